"""The weights of a run, by version: `tailrace eval` measures them, `tailrace export` hands them out."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from tailrace.config.errors import ConfigError
from tailrace.config.tree import HELD_OUT
from tailrace.envs import inputs
from tailrace.launch.evaluation import measure
from tailrace.launch.folder import CHECKPOINTS
from tailrace.launch.limits import allow_files
from tailrace.logs import output
from tailrace.obs.progress import Progress
from tailrace.protocol import RecordEvaluation
from tailrace.scoring import EvalResult
from tailrace.store.journal import Journal
from tailrace.trainer.export import as_model_folder, write_model
from tailrace.trainer.manifest import ORIGIN, CheckpointError, check, found_in, step_of
from tailrace.types import RIGHT_ABOVE
from tailrace.wording import counted

log = logging.getLogger(__name__)

OTHER_FORMATS = (".csv", ".json", ".jsonl", ".html", ".db")  # that an export of samples might be taken for


def evaluate(run: Path, version: int | str | None) -> int:
    """Print the held-out accuracy of a version: the newest, unless one is named."""
    allow_files()
    journal = Journal(run)
    config = journal.config
    weights = weights_of(journal, version)
    for change in inputs.changed(journal.meta, inputs.task_files(config)):
        log.info("note: %s since the run was begun", change)
    with Progress("held-out accuracy") as progress, as_model_folder(weights) as folder:
        found = measure(config, folder, lambda done, total: progress(done, total, "samples"))
    if not found.total:
        raise ConfigError("no rows are held out, so there is no accuracy to measure; write task.eval_rows above 0")
    for result in found.results:
        output(f"{weights.name}: {_said(result)}")
    return 0


def _said(result: EvalResult) -> str:
    k, failed = result.samples, f", {result.failed} without a verdict" if result.failed else ""
    passed = "".join([f", pass@{each} {share:.3f}" for each, share in result.passed.items() if each > 1])
    name, avg = "" if result.name == HELD_OUT else f"{result.name}: ", f"avg@{k}: " if k > 1 else ""
    return (
        f"{name}accuracy {result.accuracy:.3f} ({avg}share of rewards above {RIGHT_ABOVE:g}){passed}, mean reward "
        f"{result.mean_reward:.3f}, on {result.prompts} held-out prompts{failed}"
    )


def export_trajectories(run: Path, out: Path) -> int:
    """All samples of a run, as one parquet file."""
    from tailrace.sinks.parquet import write_trajectories

    if out.suffix.lower() in OTHER_FORMATS:
        raise ConfigError(f"{out} would be a parquet file by another name; write one that ends in .parquet")
    if out.exists():
        raise ConfigError(f"{out} exists; name a new file")
    if Journal(run).meta.get("driver") == "simulation":
        raise ConfigError(f"{run} is a simulation, which has no samples; name a run of 'tailrace train'")
    draft = out.with_name(f".{out.name}.new")
    try:
        count = write_trajectories(run, draft)
        draft.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}); name another file") from None
    finally:
        draft.unlink(missing_ok=True)
    output(f"{counted(count, 'sample')} of {run} in {out}")
    return 0


def export(run: Path, version: int | str | None, out: Path) -> int:
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


def numbered(journal: Journal, version: int | str | None) -> int | None:
    """The best is one with a number."""
    return _best(journal) if isinstance(version, str) else version


def _best(journal: Journal) -> int:
    """The version with the highest accuracy among those that were evaluated while training."""
    commands = [one for entry in journal.entries() for one in entry.commands]
    recorded = [one for one in commands if isinstance(one, RecordEvaluation)]
    if not recorded:
        raise ConfigError("nothing was evaluated while training, so no version is known to be the best (eval.every)")
    return recorded[-1].best[0]


def weights_of(journal: Journal, version: int | str | None) -> Path:
    """The directory of a version; 0 is what the run started from."""
    run = journal.path.parent
    version = numbered(journal, version)
    saved = {step_of(path): path for path in found_in(run / CHECKPOINTS)}
    if not saved and not journal.config.model.path:
        raise ConfigError(f"{run} was simulated or emulated, so it has no weights; name a run that trained a model")
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
            "(eval.keep_best = K keeps the best, trainer.archive_every = N every Nth checkpoint permanently)"
        )
    try:
        check(saved[version])
    except CheckpointError as error:
        raise ConfigError(f"{error}; write --version with another one") from None
    return saved[version]
