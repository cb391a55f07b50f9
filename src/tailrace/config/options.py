"""Command-line words into settings: `--schedule.kind sync`, `--schedule.kind=sync`, `--repack.enabled`.

A value is read as TOML would read it, guided by its field: text needs no quotes, a flag may stand alone. Whether the
value fits is not judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tailrace.config.errors import ConfigError
from tailrace.config.fields import fields, is_bool, is_list, is_list_of_numbers, is_list_of_words, is_number, open_table
from tailrace.config.files import Given, TomlError, anchored, read_toml


def read_words(words: Sequence[str]) -> dict[str, Given]:
    """Settings by dotted key; of an option given twice the last one counts."""
    return {key: Given(anchored(key, _value(key, text), Path.cwd()), f"--{key}") for key, text in _options(list(words))}


def _options(words: list[str]) -> Iterator[tuple[str, str | None]]:
    while words:
        name, equals, text = _option(words.pop(0))
        if equals:
            yield name, text
        elif words and not words[0].startswith("--"):
            yield name, words.pop(0)
        else:
            yield name, None


def _option(word: str) -> tuple[str, str, str]:
    if not word.startswith("--") or word == "--":
        raise ConfigError(f"'{word}' is not an option; a setting is written --schedule.kind sync, with two dashes")
    name, equals, text = word[2:].partition("=")
    return name.replace("-", "_"), equals, text


def _value(key: str, text: str | None) -> Any:
    known = key in fields()
    if text is None:
        if known and not is_bool(key):
            raise ConfigError(f"--{key} has no value; write --{key} VALUE or --{key}=VALUE")
        return True
    if known and is_bool(key):
        return {"true": True, "false": False}.get(text.lower(), text)
    if known and is_list_of_numbers(key):
        return _numbers(text)
    if known and is_list_of_words(key) and not text.startswith("["):
        return [word.strip() for word in text.split(",") if word.strip()]
    if known and is_list(key):
        return _list(text)
    if open_table(key):
        value = _toml(text)
        return text if value is None else value
    return _number(text) if known and is_number(key) else _unquoted(text)


def _list(text: str) -> Any:
    """`["a", "b"]` as TOML has it; anything else is a list of one."""
    whole = _toml(text) if text.startswith("[") else None
    return [_unquoted(text)] if whole is None else whole


def _numbers(text: str) -> Any:
    """`[0, 1]` as TOML has it, or `0,1` as a shell likes it."""
    whole = _toml(text if text.startswith("[") else f"[{text}]")
    return text if whole is None else whole


def _number(text: str) -> Any:
    """The number, or the text itself for the field to refuse. `.5` and `007` are not TOML, but are clear enough."""
    value = _toml(text)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return float(text)
    except ValueError:
        return text


def _unquoted(text: str) -> str:
    value = _toml(text) if text[:1] in ("'", '"') else text
    return value if isinstance(value, str) else text


def _toml(text: str) -> Any:
    try:
        table = read_toml(f"value = {text}")
    except TomlError:
        return None
    return table["value"] if len(table) == 1 else None
