"""What a Python program gives a run, as the command line takes it: a folder, a file of settings, rows, a reward.

Settings are checked here, in the caller's process, so a mistake is an exception before anything is started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import chain, count
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

import msgspec

from tailrace.api.functions import write_reward
from tailrace.config import Config, ConfigError, from_keywords, render
from tailrace.launch.folder import INPUTS, has_run, refuse_taken, run_folder
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER

SETTINGS = "settings.toml"
File = str | PathLike[str]


def write_inputs(files: Iterable[File], given: Mapping[str, Any]) -> tuple[Config, Path, Path]:
    """Settings, folder of the run, and the file that has them all. Nothing is written where they are refused."""
    paths = [_path(file) for file in files]
    settings, objects = apart(given)
    folder = _folder(from_keywords(settings, paths), paths, "run.name" in settings)
    refuse_taken(folder)
    settings |= write_objects(objects, folder)
    settings |= {"run.folder": str(folder.parent), "run.name": folder.name}
    config = from_keywords(settings, paths)
    file = folder / INPUTS / SETTINGS
    file.touch(PRIVATE)
    file.write_text(render(config))
    return config, folder, file


def _path(file: Any) -> Path:
    if not isinstance(file, str | PathLike):
        raise ConfigError(f"a file of settings is {type(file).__name__}; write its path, or settings as arguments")
    return Path(fspath(cast("File", file)))


def apart(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings as they can be written down; and by their keys, rows in memory and functions."""
    settings = _settings(given)
    keys = [key for key in ("task.data", "task.eval_data") if _is_rows(settings.get(key))]
    keys += ["task.reward"] if callable(settings.get("task.reward")) else []
    return settings, {key: settings.pop(key) for key in keys}


def write_objects(objects: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Rows and functions become files in the folder of the run; what the settings say of them."""
    inputs = folder / INPUTS
    inputs.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    return {
        key: write_reward(value, inputs) if key == "task.reward" else _write_rows(value, inputs / f"{key[5:]}.jsonl")
        for key, value in objects.items()
    }


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """`model`, `data`, `reward`, `eval_data` and `name` are the settings that nearly every call has."""
    short = {"data": "task.data", "eval_data": "task.eval_data", "reward": "task.reward", "name": "run.name"}
    found = {short.get(name, name): value for name, value in given.items() if value is not None}
    reward = found.get("task.reward")
    if reward is not None and not (callable(reward) or isinstance(reward, str)):
        raise ConfigError(f"reward is {type(reward).__name__}; write a function, or 'file.py:function'")
    model = found.pop("model", None)
    if isinstance(model, str | PathLike):
        return found | {"model.path": model}
    if model is not None and not isinstance(model, Mapping):
        raise ConfigError(
            f"model is {type(model).__name__}; write the path of a directory (a model in memory is written with "
            "model.save_pretrained(PATH), and its tokenizer likewise)"
        )
    return found if model is None else found | {"model": model}


def _folder(config: Config, paths: list[Path], named: bool) -> Path:
    """Where nobody named the run: `NAME-2` where there is a `NAME` already, and so on."""
    folder = run_folder(config, [str(path) for path in paths] or [_program()])
    if named or config.run.name:
        return folder
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(each for each in chain((folder,), others) if not has_run(each))


def _program() -> str:
    """The name of the script; that of a notebook is not known."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(main) if main and "ipykernel" not in main else "notebook"


def _is_rows(value: Any) -> bool:
    return value is not None and not isinstance(value, str | PathLike)


def _write_rows(rows: Any, file: Path) -> str:
    """A list of dictionaries, a pandas frame or a Hugging Face dataset, as JSONL."""
    lines = [_line(row, f"row {number} of {file.stem}") for number, row in enumerate(_rows(rows), start=1)]
    file.touch(PRIVATE)
    file.write_bytes(b"".join(lines))
    return str(file)


def _line(row: Any, which: str) -> bytes:
    try:
        return msgspec.json.encode(row, enc_hook=_plain) + b"\n"
    except UnicodeEncodeError as error:
        letter = ascii(error.object[error.start])
        raise ConfigError(f"{which} has {letter}, half of a character, which is no text; write another") from None
    except TypeError as error:
        raise ConfigError(f"{which} cannot be written as JSON: {error}; write text and numbers") from None


def _rows(rows: Any) -> list[dict[str, Any]]:
    if isinstance(rows, Mapping):  # columns, or a dataset with splits
        names = ", ".join(map(repr, list(cast("Mapping[Any, Any]", rows))[:5]))
        raise ConfigError(
            f"data is {type(rows).__name__} of {names}; write rows, each a dictionary, or one split of it"
        )
    if hasattr(rows, "to_list") and hasattr(rows, "features"):  # a dataset
        rows = rows.to_list()
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a frame
        rows = rows.to_dict("records")
    elif not isinstance(rows, Iterable):
        raise ConfigError(f"data is {type(rows).__name__}; write rows, each a dictionary, or the path of a file")
    found = list(cast("Iterable[Any]", rows))
    for number, row in enumerate(found, start=1):
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise ConfigError(f"row {number} of the data is {kind}; write dictionaries with 'prompt' and 'answer'")
    return found


def _plain(value: Any) -> Any:
    """Numbers and lists of NumPy."""
    for name in ("item", "tolist"):
        if hasattr(value, name) and (name == "tolist" or getattr(value, "shape", None) == ()):
            return getattr(value, name)()
    raise TypeError(f"{type(value).__name__} is no JSON")
