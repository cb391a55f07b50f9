"""Where a run lies on disk, and whether one may be begun or resumed there."""

from __future__ import annotations

from pathlib import Path

from tailrace.config.errors import ConfigError
from tailrace.config.fields import read
from tailrace.config.resuming import fixed, goes_further
from tailrace.config.tree import Config
from tailrace.envs import inputs
from tailrace.obs.summary import JSON as SUMMARY
from tailrace.release import __version__
from tailrace.store.folder import is_being_written
from tailrace.store.journal import Journal
from tailrace.store.run import RunStore
from tailrace.store.waiting import to_terminal
from tailrace.wording import counted

CHECKPOINTS = "checkpoints"
INPUTS = "inputs"  # what a Python program gave the run
RELEASE, RELEASES = "tailrace", "releases"  # in the run's meta table
LONGEST_NAME = 200  # bytes; file systems take 255


def run_folder(config: Config, files: list[str]) -> Path:
    """`runs/NAME`, where NAME is run.name or that of the settings file."""
    name = config.run.name or (Path(files[-1]).stem if files else "run")
    if Path(name).name != name or name in (".", "..") or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise ConfigError(f"run.name is {name[:80]!r}, not the name of a directory; write a short one, no slashes")
    return Path(config.run.folder) / name


def has_run(folder: Path) -> bool:
    return (folder / "run.db").exists()


def is_complete(folder: Path) -> bool:
    return Journal(folder).complete


def is_over(folder: Path, config: Config) -> bool:
    """It came to its end, and has nothing more to do with these settings either."""
    journal = Journal(folder)
    return journal.complete and not goes_further(journal.config, config)


def begin_store(folder: Path, config: Config) -> RunStore:
    """A new run."""
    refuse_taken(folder)
    pins = inputs.pinned(config)
    store = RunStore.create(folder, config)
    inputs.record(store.meta, pins)
    store.commit()
    return store


def resume_store(folder: Path, config: Config, accept: bool) -> RunStore:
    """One that was interrupted. `accept`: its inputs may be other ones than before."""
    store = _reopened(folder, config)
    try:
        inputs.settle(store.meta, store.last_seq, inputs.pinned(config), accept, to_terminal)
    except ValueError:
        store.close(complete=False)
        raise
    _note_release(store)
    return _configured(store, config)


def take_over_store(folder: Path, config: Config) -> RunStore:
    """One that goes on, with another controller."""
    return _configured(_reopened(folder, config), config)


def _reopened(folder: Path, config: Config) -> RunStore:
    before = Journal(folder).config
    store = RunStore.reopen(folder, complete=goes_further(before, config))
    try:
        _refuse_other(store.config, config, folder)
    except ConfigError:
        store.close(complete=False)
        raise
    return store


def _configured(store: RunStore, config: Config) -> RunStore:
    store.go_on(config)
    (store.folder / SUMMARY).unlink(missing_ok=True)
    return store


def refuse_taken(folder: Path) -> None:
    """ConfigError if there is a run."""
    if not has_run(folder):
        return
    another = "begin another with --run.name NAME"
    if is_being_written(folder):
        raise ConfigError(f"{folder} has a run that goes on now; watch it with tailrace page {folder}, or {another}")
    if is_complete(folder):
        raise ConfigError(f"{folder} has a complete run; look at it with tailrace page {folder}, or {another}")
    raise ConfigError(f"{folder} already has a run; go on with it by --resume, or {another}")


def _note_release(store: RunStore) -> None:
    """Another release may decide otherwise: what a run did is explained by those that ran it."""
    writer = store.meta.get(RELEASE)
    if writer != __version__:
        to_terminal(f"this run was written by tailrace {writer} until now, and goes on with tailrace {__version__}")
        before = store.meta.get(RELEASES) or f"{writer} from event 1"
        store.meta.set(RELEASES, f"{before}, {__version__} from event {store.last_seq + 1}")
        store.meta.set(RELEASE, __version__)


def _refuse_other(before: Config, now: Config, folder: Path) -> None:
    for key in fixed(before, now):
        raise ConfigError(
            f"{folder} was begun with {key} = {read(before, key)!r}, and now it is {read(now, key)!r}, which a run "
            f"cannot change; go on with what it had, or make another run of it with tailrace fork {folder}"
        )
    if now.run.steps < before.run.steps:
        raise ConfigError(
            f"{folder} has {counted(before.run.steps, 'step')}; write run.steps = {before.run.steps} or more"
        )
