"""TOML files into settings: reading, `extends`, and where every value came from.

Settings are held flat, by dotted key, so composing files left to right is a dictionary update and an error can name
the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

from tailrace.config.errors import ConfigError
from tailrace.errors import TailraceError

LONGEST = 1 << 20  # bytes of a settings file; the longest of ours has 2,000
MOST_FILES = 64  # that one file may lead to by `extends`
DEEPEST = 16  # tables in tables; our settings go three deep, and a task's own options may go further
MOST_DOTS = 2000  # in a line: the time and memory that TOML takes for a dotted key grow with its square

PATH_KEYS = ("model.hf_config", "model.path", "workload.lengths.file", "task.data", "task.eval_data")
EVAL_SETS = "eval.sets."  # and a name
CODE_KEYS = ("task.reward", "task.name")  # an import path, or "file.py:name"
EXECUTABLE = "rollout.python"  # not resolved: where the link lies is what makes it that environment's Python
PACKAGE = "package:"  # a model that an installed package carries, not a path


class Given(NamedTuple):
    """A value and where it was written: a file, or an option as it was typed."""

    value: Any
    where: str


def read_file(path: str | Path) -> dict[str, Given]:
    """The settings of one file on top of those it extends."""
    return _read(Path(path), (), count(1))


def anchored(key: str, value: Any, folder: Path) -> Any:
    """A path made absolute, so that it means the same wherever the settings are written to; else the value itself."""
    if not isinstance(value, str) or not value:
        return value  # what is no text is refused where values are judged
    if key == EXECUTABLE and "/" in value:
        return os.path.abspath(folder / Path(value).expanduser())
    is_path = (
        key.startswith(EVAL_SETS)
        or (key in PATH_KEYS and not value.startswith(PACKAGE))
        or (key in CODE_KEYS and ".py:" in value)
    )
    if is_path and "\0" in value:
        raise ConfigError(f"{key} is {value[:60]!r}, which is no path: it has a zero byte; write one without")
    return str((folder / Path(value).expanduser()).resolve()) if is_path else value


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"schedule": {"kind": "sync"}}` as `("schedule.kind", "sync")`. An empty table stays one."""
    if prefix.count(".") > DEEPEST:
        raise ConfigError(f"{prefix[:60]}... is nested more than {DEEPEST} tables deep; no setting is")
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = deepcopy(value)  # more of a table may follow
    return table


def read_text(path: Path) -> str:
    """The text of a file a person named, or one sentence about why there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist{_neighbour(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name a file in it, for example {path / 'run.toml'}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read ({reason}); check its path and permissions") from None
    if len(content) > LONGEST:
        raise ConfigError(f"{path} has more than {LONGEST:,} bytes, so it is no file of settings")
    return text


def _read(path: Path, readers: tuple[Path, ...], files: count[int]) -> dict[str, Given]:
    if next(files) > MOST_FILES:
        raise ConfigError(f"{readers[0]} extends more than {MOST_FILES} files; put some of them together")
    if path.resolve() in readers:
        chain = " -> ".join(each.name for each in (*readers, path))
        raise ConfigError(f"{path} extends itself ({chain}); remove one extends")
    table = _parse(path)
    settings: dict[str, Given] = {}
    for base in _bases(path, table.pop("extends", [])):
        settings |= _read(base, (*readers, path.resolve()), files)
    return settings | {key: Given(anchored(key, value, path.parent), str(path)) for key, value in flat(table)}


def _parse(path: Path) -> dict[str, Any]:
    try:
        return read_toml(read_text(path))
    except TomlError as error:
        reason = str(error)
        hint = "" if path.suffix == ".toml" else "; name a file of settings, which may name data and reward"
        raise ConfigError(f"{path} is not valid TOML: {reason[:1].lower()}{reason[1:]}{hint}") from None


class TomlError(TailraceError):
    """A text is no TOML, or more of it than is read here."""


def read_toml(text: str) -> dict[str, Any]:
    """The one place where TOML is parsed: whatever is wrong with it is a `TomlError`."""
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise TomlError(f"a line has more than {MOST_DOTS:,} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TomlError("it is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and numbers with thousands of digits
        raise TomlError(str(error)) from None


def _bases(path: Path, extends: Any) -> list[Path]:
    names = cast("list[Any]", extends if isinstance(extends, list) else [extends])
    if not all(isinstance(name, str) and name and "\0" not in name for name in names):
        raise ConfigError(f'{path}: extends wants a file name or a list of them; write extends = "base.toml"')
    return [path.parent / name for name in names]


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor does the directory {path.parent}"
    names = [each.name for each in path.parent.iterdir() if each.is_file()]
    close = get_close_matches(path.name, names, n=1)
    if close:
        return f"; did you mean {path.parent / close[0]}?"
    listed = (
        "" if path.suffix or path.parent != Path() else "; or is it one of a list? Write that as A,B, without spaces"
    )
    return f"; check its path{listed}"
