"""What the controller's process of `tailrace train` and `tailrace fork` does, after its supervisor has forked it:
settings, limits, the run."""

from __future__ import annotations

import logging
from pathlib import Path

from tailrace.config import Config, ConfigError, load
from tailrace.config.load import load_section, with_given
from tailrace.config.options import read_words
from tailrace.launch.beginning import Beginning
from tailrace.launch.limits import allow_files, needed_files
from tailrace.launch.supervisor import Supervisor
from tailrace.runtime.placement import refuse_lacking_interface

log = logging.getLogger(__name__)


def control(files: list[str], settings: list[str], beginning: Beginning, supervisor: Supervisor) -> int:
    config, folder = _told(files, settings, beginning)
    of_settings = tuple([file for file in files if Path(file) != folder])
    return drive(config, folder, beginning._replace(files=of_settings), supervisor)


def drive(config: Config, folder: Path, beginning: Beginning, supervisor: Supervisor) -> int:
    """A run with these settings in this folder, to its end; returns the exit code."""
    allow_files(needed_files(config))
    refuse_lacking_interface(config)
    from tailrace.launch.cards import deal_cards
    from tailrace.launch.folder import has_run, is_over
    from tailrace.launch.train import train

    begun = beginning.auto and has_run(folder)
    if begun and not supervisor.begun and is_over(folder, config):
        log.info("%s has a complete run; nothing is left to do", folder)
        return 0
    beginning = beginning._replace(resume=beginning.resume or begun)
    if supervisor.begun and beginning.origin:
        config = _as_begun(folder)
    dealt = deal_cards(config, folder, beginning.resume, supervisor.begun)
    allow_files(needed_files(dealt.config))
    return 0 if train(dealt, folder, beginning, supervisor) else 130


def _told(files: list[str], settings: list[str], beginning: Beginning) -> tuple[Config, Path]:
    from tailrace.launch.folder import has_run, run_folder

    if beginning.origin:
        from tailrace.launch.fork import forked

        return forked(beginning.origin, read_words(settings))
    if len(files) == 1 and has_run(Path(files[0])):
        return _of_run(Path(files[0]), settings, beginning)
    if beginning.resume and len(files) == 1 and Path(files[0]).is_dir():
        raise ConfigError(f"{files[0]} has no run to resume; name the folder of a run, or its file of settings")
    folder = run_folder(load_section(files, settings, "run"), files)
    if (beginning.resume or beginning.auto) and has_run(folder):
        from tailrace.launch.resumed import resumed

        return resumed(folder, files, settings), folder
    return load(files, settings), folder


def _of_run(run: Path, settings: list[str], beginning: Beginning) -> tuple[Config, Path]:
    """A run in place of its file of settings: it has them all."""
    if not beginning.resume and not beginning.auto:
        raise ConfigError(f"{run} is a run; go on with it by --resume, or make another of it with tailrace fork {run}")
    return with_given(_as_begun(run), read_words(settings)), run


def _as_begun(run: Path) -> Config:
    from tailrace.store.journal import Journal

    return Journal(run).config
