"""Where a run lies on disk, and whether one may be begun or resumed there."""

from __future__ import annotations

from pathlib import Path

from tailrace.config.errors import ConfigError
from tailrace.config.fields import fields, read
from tailrace.config.tree import Config
from tailrace.obs.summary import JSON as SUMMARY
from tailrace.store.journal import Journal
from tailrace.store.run import RunStore, is_being_written

# What a resumed run may be given anew: nothing that control decides by, because its decisions so far are replayed.
MAY_CHANGE = {
    "run.steps",
    "run.name",
    "run.folder",
    "run.archive",
    "run.evaluate",
    "local.port",
    "local.listen",
    "local.start_s",
    "trainer.learning_rate",  # that of a run that has diverged was too high
    "trainer.critic_learning_rate",
    "trainer.max_grad_norm",
}
CHECKPOINTS = "checkpoints"
LONGEST_NAME = 200  # bytes; file systems take 255


def run_folder(config: Config, files: list[str]) -> Path:
    """`runs/NAME`, where NAME is run.name or that of the settings file."""
    name = config.run.name or (Path(files[-1]).stem if files else "run")
    if Path(name).name != name or name in (".", "..") or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise ConfigError(f"run.name is {name[:80]!r}, not the name of a directory; write a short one, no slashes")
    return Path(config.run.folder) / name


def open_store(folder: Path, config: Config, resume: bool) -> RunStore:
    """A new run, or one that was interrupted."""
    if not resume:
        _refuse_taken(folder)
        return RunStore.create(folder, config)
    store = RunStore.reopen(folder)
    try:
        _refuse_other(store.config, config, folder)
    except ConfigError:
        store.close(complete=False)
        raise
    store.meta.configure(config)
    (folder / SUMMARY).unlink(missing_ok=True)  # of a run that failed: it goes on now
    return store


def _refuse_taken(folder: Path) -> None:
    if not (folder / "run.db").exists():
        return
    another = "begin another with --run.name NAME"
    if is_being_written(folder):
        raise ConfigError(f"{folder} has a run that goes on now; watch it with tailrace page {folder}, or {another}")
    if Journal(folder).complete:
        raise ConfigError(f"{folder} has a complete run; look at it with tailrace page {folder}, or {another}")
    raise ConfigError(f"{folder} already has a run; go on with it by --resume, or {another}")


def _refuse_other(before: Config, now: Config, folder: Path) -> None:
    for key in fields():
        if read(before, key) != read(now, key) and key not in MAY_CHANGE:
            raise ConfigError(
                f"{folder} was begun with {key} = {read(before, key)!r}, and now it is {read(now, key)!r}; "
                "a resumed run goes on with the settings that it had"
            )
    if now.run.steps < before.run.steps:
        raise ConfigError(
            f"{folder} was begun for {before.run.steps} steps; write run.steps = {before.run.steps} or more"
        )
