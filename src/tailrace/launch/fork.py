"""`tailrace fork`: another run that begins with the weights and moments of a version of a recorded one.

It has the settings of the first run, except for those that are given, and counts its own steps from 0. The checkpoint
is linked into its folder, so the first run may go on, delete it or be deleted. What it was made from is in its `meta`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.config.fields import read
from tailrace.config.files import Given
from tailrace.config.load import with_given, with_values
from tailrace.config.tree import Config
from tailrace.launch.beginning import Origin
from tailrace.launch.folder import CHECKPOINTS, INPUTS, begin_store, has_run, run_folder
from tailrace.launch.models import numbered, weights_of
from tailrace.protocol import Command, Generate, Train
from tailrace.store.folder import PRIVATE_FOLDER
from tailrace.store.journal import RUN, Journal
from tailrace.store.run import RunStore
from tailrace.trainer.manifest import ORIGIN, found_in, step_of

log = logging.getLogger(__name__)

KEY = "origin"  # in `meta`
OF_PYTHON = ("task.data", "task.eval_data", "task.reward")  # may lie with a run that a program began


class Recorded(msgspec.Struct):
    """What a run notes of the one that it was made from."""

    run: str
    id: str
    version: int


def forked(origin: Origin, given: dict[str, Given]) -> tuple[Config, Path]:
    """Settings and folder of the new run, from those of the first and what somebody wrote."""
    journal = Journal(origin.run)
    _refuse(journal, given)
    config, version = journal.config, _version(journal, origin.version)
    follows = {
        "run.folder": str(origin.run.resolve().parent),
        "run.steps": max(1, config.run.steps - version),
        "task.start": config.task.start + _prompts_before(journal, version),
    }
    config = with_given(config, {key: Given(value, "") for key, value in follows.items()} | given)
    return config, run_folder(config, [])


def _refuse(journal: Journal, given: dict[str, Given]) -> None:
    if journal.config.trainer.engine == "emulated" or not journal.config.model.path:
        raise ConfigError(f"{journal.path.parent} was simulated or emulated, so it has no weights to fork")
    if "run.name" not in given:
        raise ConfigError("the new run has no name; write --run.name NAME")
    shape = next((key for key in given if key.startswith("model.")), "")
    if shape:
        raise ConfigError(f"--{shape} cannot differ from the first run's, whose weights the new one begins with")


def _version(journal: Journal, asked: int | str | None) -> int:
    saved = [step_of(path) for path in found_in(journal.path.parent / CHECKPOINTS)]
    version = numbered(journal, asked)
    return version if version is not None else max(saved, default=0)


def _prompts_before(journal: Journal, version: int) -> int:
    """Up to and with the last prompt of the sequence that had been trained on when the version was made."""
    prompts, trained = dict[int, int](), set[int]()
    for command in _commands(journal):
        if isinstance(command, Generate):
            prompts |= {request.group: request.prompt for request in command.requests}
        elif isinstance(command, Train) and command.step < version:
            trained |= {group.group for group in command.groups}
    return max((prompts[group] for group in trained), default=-1) + 1


def _commands(journal: Journal) -> Iterator[Command]:
    return (command for entry in journal.entries() for command in entry.commands)


def begin_fork(folder: Path, config: Config, origin: Origin) -> RunStore:
    """The checkpoint first: a run.db without it would begin with other weights."""
    journal = Journal(origin.run)
    weights, version = weights_of(journal, origin.version), _version(journal, origin.version)
    if found_in(weights.parent):  # else it is what the first run started from, and the settings name it
        _link(weights, folder)
    store = begin_store(folder, _with_own_inputs(config, origin.run, folder))
    recorded = Recorded(str(origin.run.resolve()), journal.meta.get(RUN, ""), version)
    store.meta.set(KEY, msgspec.json.encode(recorded).decode())
    store.commit()
    log.info("%s begins with v%d of %s, for %d steps", folder, version, origin.run, config.run.steps)
    return store


def _with_own_inputs(config: Config, first: Path, folder: Path) -> Config:
    """What a Python program gave the first run is copied: that run may be deleted."""
    theirs, ours = first.resolve() / INPUTS, folder.resolve() / INPUTS
    names = {key: Path(read(config, key)).name for key in OF_PYTHON if Path(read(config, key)).parent == theirs}
    if not names or has_run(folder):
        return config
    ours.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    for name in names.values():
        file = name.partition(":")[0]  # of a reward, its function follows
        shutil.copy(theirs / file, ours / file)
    return with_values(config, {key: str(ours / name) for key, name in names.items()})


def _link(weights: Path, folder: Path) -> None:
    if (folder / "run.db").exists():
        return  # it is refused
    target = folder / ORIGIN / weights.name
    try:
        shutil.rmtree(folder / ORIGIN, ignore_errors=True)
        target.mkdir(PRIVATE_FOLDER, parents=True)
        for file in weights.iterdir():
            _link_or_copy(file, target / file.name)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}); name another run.folder") from None


def _link_or_copy(file: Path, target: Path) -> None:
    """Nobody ever writes to a checkpoint's files, so both runs may have the same."""
    try:
        os.link(file, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(file, target)
