"""A reward function of a script or a notebook, written down so that the processes that score can load it.

A function at the top of a module is named by its file, as on the command line. Any other, of a notebook, of the script
itself or with a closure, is pickled by value into a file of the run, which its owner alone may write: judges import it
as they import every reward, within their limits. What cannot be pickled is refused, with its name.
"""

from __future__ import annotations

import base64
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tailrace.config.errors import ConfigError
from tailrace.store.folder import PRIVATE

LARGEST = 32 << 20  # bytes of a pickled function: each judge loads it
NAME = "reward"
TEXT = '''"""A function of the Python program that began this run, pickled by value. It is loaded where rewards are."""

import base64
import pickle
import sys

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
{name} = pickle.loads(base64.b64decode({code!r}))
'''


def write_reward(function: Callable[..., Any], folder: Path) -> str:
    """`file.py:name` of the function, for `task.reward`."""
    if not callable(function):
        raise ConfigError(f"reward is {type(function).__name__}; write a function, or 'file.py:function'")
    named = _in_a_file(function)
    if named:
        return named
    file = folder / f"{NAME}.py"
    file.touch(PRIVATE)
    file.write_text(TEXT.format(folders=_folders(), name=NAME, code=base64.b64encode(_pickled(function)).decode()))
    return f"{file}:{NAME}"


def _in_a_file(function: Callable[..., Any]) -> str:
    """Where a module has it under its own name; nothing for what only this process has."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or not file or not file.endswith(".py"):
        return ""
    return f"{Path(file).resolve()}:{name}" if getattr(module, name, None) is function else ""


def _folders() -> list[str]:
    """Where this program finds its modules: what the function imports is found there too."""
    return [str(Path(folder or ".").resolve()) for folder in sys.path if Path(folder or ".").is_dir()]


def _pickled(function: Callable[..., Any]) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise ConfigError(
            f"the function {_name(function)} is in no module of its own, and to send it to other processes takes "
            "cloudpickle; install tailrace[train], or write it into a file: reward='rewards.py:function'"
        ) from None
    try:
        found: bytes = cloudpickle.dumps(function)
    except Exception as error:  # the border to the user's objects, which raise whatever they like
        raise ConfigError(_refusal(function, cloudpickle.dumps, error)) from None
    if len(found) > LARGEST:
        size = f"{len(found) / 1e6:.0f} MB, of {LARGEST / 1e6:.0f}"
        raise ConfigError(f"the function {_name(function)} brings {size}, with {_largest(function, cloudpickle.dumps)}")
    return found


def _refusal(function: Callable[..., Any], dumps: Callable[[Any], bytes], error: Exception) -> str:
    blamed = [name for name, value in _used(function) if not _can(dumps, value)]
    uses = f"it uses {', '.join(blamed)}" if blamed else str(error)
    return (
        f"the function {_name(function)} cannot be sent to the processes that score: {uses}; "
        "make that inside the function, or write the function into a file: reward='rewards.py:function'"
    )


def _can(dumps: Callable[[Any], bytes], value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # as above
        return False
    return True


def _largest(function: Callable[..., Any], dumps: Callable[[Any], bytes]) -> str:
    sizes = {name: len(dumps(value)) for name, value in _used(function)}
    return max(sizes, key=lambda name: sizes[name]) if sizes else "what it holds"


def _used(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What it brings along, by name: variables of the functions around it, and globals."""
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return
    yield from {**found.nonlocals, **found.globals}.items()


def _name(function: Callable[..., Any]) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))
