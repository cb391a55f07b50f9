"""A Config back into TOML, such that `load` reads the same Config: for `--dry-run` and for fragments to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from tailrace.config.defaults import FOLLOWING, follow
from tailrace.config.fields import UNSET, fields, leaf, read
from tailrace.config.model_shapes import SHAPE_FIELDS, origin_shape
from tailrace.config.tree import Config

DEFAULT = Config()
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)} | {ord('"'): '\\"', ord("\\"): "\\\\"}


def render(config: Config, only_changed: bool = False, alone: bool = False) -> str:
    """TOML text, one table per section. What the model's preset says is shown as a comment, not repeated.

    `alone`: the text needs no other file, so what a model's config.json says is written out.
    """
    known = {} if alone and not config.model.preset else _from_preset(config)
    values = changes(config) if only_changed else {key: read(config, key) for key in fields() if key not in known}
    comments = {} if only_changed else known
    return "\n".join(_tables(values, comments))


def render_values(values: Mapping[str, Any]) -> str:
    """TOML text of some settings, by dotted key, those that are at their default included."""
    return "\n".join(_tables(values, {}))


def changes(config: Config) -> dict[str, Any]:
    """The settings that differ from their default, by dotted key: the least that makes this Config."""
    known = _from_preset(config)
    values = {key: value for key, value in _differing(config) if key not in known}
    for key in FOLLOWING:
        others = {other: value for other, value in values.items() if other != key}
        if follow(others, config.model.context)[key] == values[key]:
            values = others
    return values


def _differing(config: Config) -> Iterator[tuple[str, Any]]:
    """What is not at its plain default; and every setting whose default follows others."""
    for key in fields():
        value = read(config, key)
        if key in FOLLOWING or value != read(DEFAULT, key):
            yield key, value


def _from_preset(config: Config) -> dict[str, Any]:
    """The figures of the model that its preset or file gives, so that another preset can take their place."""
    shape = origin_shape(config.model)
    given = {name: getattr(config.model, name) for name in SHAPE_FIELDS if shape}
    return {f"model.{name}": value for name, value in given.items() if value == shape.get(name)}


def _tables(values: Mapping[str, Any], comments: Mapping[str, Any]) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for key in fields():
        if key in values or key in comments:
            sections.setdefault(key.rpartition(".")[0], []).append(key)
    for section, keys in sections.items():
        yield f"[{section}]"
        for key in keys:
            yield _line(key, values[key]) if key in values else f"# {_line(key, comments[key])}"
        yield ""


def _line(key: str, value: Any) -> str:
    return f"{leaf(key)} = {literal(value)}"


def literal(value: Any) -> str:
    match value:
        case None:
            return f'"{UNSET}"'
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value.translate(_ESCAPES)}"'
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case tuple() | list():
            return f"[{', '.join(literal(each) for each in cast('list[Any]', value))}]"
        case dict():
            pairs = [f"{literal(key)} = {literal(each)}" for key, each in cast("dict[str, Any]", value).items()]
            return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
        case _:
            return repr(value)
