"""Settings as keyword arguments of a Python function: `trainer={"learning_rate": 1e-5}`, or `learning_rate=1e-5`.

A section is a dictionary. A name that only one section has needs no section, and any may have it in front
(`trainer_threads=1`); of one that several have, the sentence says which. Dotted keys can be unpacked:
`**{"trainer.learning_rate": 1e-5}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

from tailrace.config.errors import ConfigError
from tailrace.config.fields import fields, leaf, sections
from tailrace.config.files import Given, anchored, flat
from tailrace.config.suggestions import Spelling

KEYWORD = "="  # where such a value was written
BARE = ("eval", "log")  # sections whose words say little without them: every, to


def read_keywords(keywords: Mapping[str, Any]) -> dict[str, Given]:
    """Settings by dotted key; paths are relative to the working directory."""
    found = {key: value for name, given in keywords.items() for key, value in _keyword(name, given)}
    return {key: Given(anchored(key, _plain(value), Path.cwd()), KEYWORD) for key, value in found.items()}


def _keyword(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name in sections() and isinstance(value, Mapping):
        yield from flat(cast("Mapping[str, Any]", value), f"{name}.")
    else:
        yield _key(name), value


def _key(name: str) -> str:
    """The setting of this name; the name itself where there is none, which is refused with what it was meant to be."""
    if "." in name or name in sections():
        return name
    found = [key for key in fields() if name in (leaf(key), key.replace(".", "_"))]
    if len(found) > 1:
        ways = " or ".join(_written(key) for key in found)
        raise ConfigError(f"{name} may be {', '.join(found)}; write {ways}")
    return found[0] if found else name


def _plain(value: Any) -> Any:
    """As TOML has it: a path is text, a tuple a list."""
    if isinstance(value, PathLike):
        return fspath(cast("PathLike[str]", value))
    return list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value


def _written(key: str) -> str:
    """`trainer.learning_rate` as an argument."""
    if "." not in key or key not in fields():
        return key
    section, word = key.split(".", 1)
    if key == "model.path":
        return "model=..."
    if section in BARE:
        return f"{key.replace('.', '_')}=..."
    if "." not in word and sum(leaf(each) == word for each in fields()) == 1:
        return f"{word}=..."
    return f'{section}={{"{word}": ...}}'


AS_KEYWORD = Spelling("an argument", _written)
