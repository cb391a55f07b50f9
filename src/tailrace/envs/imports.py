"""What the user has written, by its path: `module:name` or `file.py:name`.

`find` looks without running anything; `load_object` imports. Every failure is a ConfigError that names the setting.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tailrace.config.errors import ConfigError


class ImportPath(NamedTuple):
    """Where an object is to be found: in a file, or in a module that Python finds by itself or in `folders`."""

    module: str
    name: str
    file: Path | None
    folders: tuple[Path, ...]


def find(path: str, folders: Sequence[Path], setting: str, others: Iterable[str] = ()) -> ImportPath:
    """Where the path points to. A relative file is looked for in each folder; of a module only the form is judged.

    `others`: names that the setting takes too, for somebody who has misspelt one.
    """
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        close = get_close_matches(path, [each for each in others if each], n=1)
        hint = f"did you mean '{close[0]}'?" if close else "write 'my_module:name' or 'my_file.py:name'"
        raise ConfigError(f"{setting} = '{path}' names no function; {hint}")
    if not module.endswith(".py"):
        return ImportPath(module, name, None, tuple(folders))
    for folder in folders:
        if (folder / module).is_file():
            file = (folder / module).resolve()
            return ImportPath(file.stem, name, file, (file.parent,))
    searched = " or ".join(str(folder) for folder in dict.fromkeys(folders))
    raise ConfigError(f"{setting} = '{path}': there is no file {module} in {searched}")


def load_object(path: str, folders: Sequence[Path], setting: str, others: Iterable[str] = ()) -> Any:
    """The callable at the path."""
    found = find(path, folders, setting, others)
    try:
        module = _module(found)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting} = '{path}': there is no module '{error.name}' to import") from None
    except (Exception, SystemExit) as error:  # the border to the user's code
        raise ConfigError(f"{setting} = '{path}' cannot be imported: {described(error)}") from error
    return _named(module, found.name, f"{setting} = '{path}'")


def described(error: BaseException) -> str:
    """An exception of the user's code in one line, with the line it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}{where}" if text else f"{type(error).__name__}{where}"


def _module(found: ImportPath) -> ModuleType:
    for folder in map(str, found.folders):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a user's `json.py` replaces nothing
    if found.file is None:
        return importlib.import_module(found.module)
    name = f"tailrace_user_{found.module}"
    spec = importlib.util.spec_from_file_location(name, found.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and the like look themselves up there
    spec.loader.exec_module(module)
    return module


def _named(module: ModuleType, name: str, given: str) -> Any:
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        own = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        close = get_close_matches(name, own, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(own) or 'no function at all'}"
        raise ConfigError(f"{given}: there is no '{name}' in it; {hint}") from None
    if not callable(found):
        raise ConfigError(f"{given} is {type(found).__name__}, which cannot be called")
    return found
