"""The weights of a run, by version: `tailrace eval` measures them, `tailrace export` hands them out."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from tailrace.config.errors import ConfigError
from tailrace.envs import inputs
from tailrace.launch.evaluation import measure
from tailrace.launch.folder import CHECKPOINTS
from tailrace.launch.limits import allow_files
from tailrace.logs import output
from tailrace.obs.progress import Progress
from tailrace.store.journal import Journal
from tailrace.trainer.export import as_model_folder, write_model
from tailrace.trainer.manifest import ORIGIN, CheckpointError, check, found_in, step_of
from tailrace.types import RIGHT_ABOVE

log = logging.getLogger(__name__)


def evaluate(run: Path, version: int | None) -> int:
    """Print the held-out accuracy of a version: the newest, unless one is named."""
    allow_files()
    journal = Journal(run)
    config = journal.config
    weights = weights_of(journal, version)
    for change in inputs.changed(journal.meta, inputs.task_files(config)):
        log.info("note: %s since the run was begun", change)
    with Progress("held-out accuracy") as progress, as_model_folder(weights) as folder:
        found = measure(config, folder, lambda done, total: progress(done, total, "prompts"))
    if not found.total:
        raise ConfigError("no rows are held out, so there is no accuracy to measure; write task.eval_rows above 0")
    failed = f", {found.failed} without a verdict" if found.failed else ""
    output(
        f"{weights.name}: accuracy {found.accuracy:.3f} (share of rewards above {RIGHT_ABOVE:g}), mean reward "
        f"{found.mean_reward:.3f}, on {found.total} held-out prompts{failed}"
    )
    return 0


def export(run: Path, version: int | None, out: Path) -> int:
    """Copy a version into a directory that transformers loads."""
    weights = weights_of(Journal(run), version)
    out = Path(os.path.abspath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; name a new directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name[:100]}.", dir=out.parent) as draft:
            write_model(weights, Path(draft) / "copy")
            out.rmdir() if out.exists() else None
            (Path(draft) / "copy").rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}); name another directory") from None
    output(f"{weights.name} of {run} is in {out}; transformers loads it with from_pretrained('{out}')")
    return 0


def weights_of(journal: Journal, version: int | None) -> Path:
    """The directory of a version; 0 is what the run started from."""
    run = journal.path.parent
    saved = {step_of(path): path for path in found_in(run / CHECKPOINTS)}
    if version is None and saved:
        version = max(saved)
    if not version and (origin := found_in(run / ORIGIN)):
        version, saved = step_of(origin[0]), {step_of(origin[0]): origin[0]}
    if not version:
        from tailrace.model.load import model_folder

        start = model_folder(journal.config.model.path)
        if changed := inputs.changed(journal.meta, inputs.model_files(journal.config)):
            raise ConfigError(f"{changed[0]} since the run was begun, so it is not what the run started from")
        return start
    if version not in saved:
        known = ", ".join(f"v{each}" for each in (0, *saved))
        raise ConfigError(
            f"{run} has no weights of v{version}; it has {known} "
            "(trainer.archive_every = N keeps every Nth checkpoint permanently)"
        )
    try:
        check(saved[version])
    except CheckpointError as error:
        raise ConfigError(f"{error}; write --version with another one") from None
    return saved[version]
