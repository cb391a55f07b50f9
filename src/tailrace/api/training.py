"""`tailrace.train` and `tailrace.fork`: a run from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from tailrace.api.inputs import File, apart, write_inputs, write_objects
from tailrace.api.run import Callback, RecordedRun, as_words, refuse_callbacks, started
from tailrace.config.errors import ConfigError
from tailrace.config.keywords import read_keywords

__all__ = ["Callback", "fork", "train"]

Rows = File | Iterable[Mapping[str, Any]]


def train(
    *files: File,
    model: File | Mapping[str, Any] | None = None,
    data: Rows | None = None,
    reward: str | Callable[..., Any] | None = None,
    eval_data: Rows | None = None,
    name: str | None = None,
    wait: bool = True,
    show: bool = True,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> RecordedRun:
    """Train, as `tailrace train` would, and return the run.

    `files` are settings in TOML, composed left to right; everything else wins over them. `model` is a Hugging Face
    directory or a GGUF file. `data` and `eval_data` are files, lists of dictionaries, pandas frames or Hugging Face
    datasets, with `prompt` and `answer`. `reward` is a function with one of the signatures in docs/tasks.md, also of a
    notebook and with a closure, or `"file.py:function"`. Any setting can be given by its name, or by its section:
    `train(..., group_size=8, trainer={"learning_rate": 1e-5})`.

    `wait=False` returns at once; `run.wait()` waits then, and the run is interrupted when this program ends. `show`:
    print what the command prints. `callbacks` are called as `callback(run, row)` after every step, with a row as in
    `run.metrics`; one that returns True stops the run, one that raises stops it and is raised here.
    """
    refuse_callbacks(callbacks)
    given = {"model": model, "data": data, "reward": reward, "eval_data": eval_data, "name": name} | settings
    _, folder, file = write_inputs(files, given)
    return started(folder, ["train", str(file)], wait, show, callbacks)


def fork(
    run: File | RecordedRun,
    *,
    name: str,
    version: int | Literal["best"] | None = None,
    wait: bool = True,
    show: bool = True,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> RecordedRun:
    """Begin another run with the weights and moments of a version of a run, and train it, as `tailrace fork` would.

    It has the settings of the first run, except for those that are given, rows and functions as for `train`, and goes
    on with the prompts after those that the version was trained on.
    """
    path = run.path if isinstance(run, RecordedRun) else Path(fspath(run) if isinstance(run, PathLike) else run)
    from tailrace.launch.beginning import Origin
    from tailrace.launch.fork import forked

    settings, objects = apart({"name": name} | settings)
    _, folder = forked(Origin(path, version), read_keywords(settings))
    if (folder / "run.db").exists():
        raise ConfigError(f"{folder} has a run already; write another name")
    given = read_keywords(settings | (write_objects(objects, folder) if objects else {}))
    chosen = [] if version is None else ["--version", str(version)]
    return started(folder, ["fork", str(path), *chosen, *as_words(given)], wait, show, callbacks)
