"""Which package each tracker needs, and how it is opened. Nothing of theirs is imported before."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from importlib.util import find_spec

from tailrace.config.errors import ConfigError
from tailrace.sinks.base import Sink, SinkName, TrackedRun
from tailrace.sinks.jsonl_sink import JsonlSink

NAMES: tuple[SinkName, ...] = ("jsonl", "tensorboard", "wandb", "trackio")


def check_packages(names: Iterable[SinkName]) -> None:
    """ConfigError, with what to install, if one is missing."""
    for name in names:
        if name != "jsonl" and find_spec(name) is None:
            raise ConfigError(f"logging to {name} needs a package: pip install 'tailrace[{name}]'")


def notes(names: Iterable[SinkName]) -> str:
    """What is worth saying before a start."""
    if "wandb" not in names:
        return ""
    from tailrace.sinks.wandb_sink import note

    return note()


def open_sink(name: SinkName, run: TrackedRun, position: int) -> Sink:
    if name == "jsonl":
        return JsonlSink(run, position)
    if name == "tensorboard":
        from tailrace.sinks.tensorboard_sink import FOLDER, TensorBoardSink

        if not position:
            shutil.rmtree(run.folder / FOLDER, ignore_errors=True)
        return TensorBoardSink(run, position)
    if name == "wandb":
        from tailrace.sinks.wandb_sink import WandbSink

        return WandbSink(run, position)
    from tailrace.sinks.trackio_sink import TrackioSink

    return TrackioSink(run, position)
