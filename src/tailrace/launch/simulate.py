"""`tailrace simulate`: which simulations the options mean, their checks, and what is shown, drawn or recorded of them.

The promise: every combination is checked before the first simulation starts, and nothing is written before that. A
schedule that nobody asked for by name and that cannot run with these settings is left out, with a note that says why.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.config import Config, ConfigError, load, render, with_values
from tailrace.config.fields import meant, read
from tailrace.config.tree import SCHEDULES
from tailrace.errors import UsageError
from tailrace.logs import output

log = logging.getLogger(__name__)

DROPPED = 0.03  # share of the groups above which it is worth a note


class SimulateOptions(NamedTuple):
    """The options of `tailrace simulate`."""

    files: Sequence[str]
    settings: Sequence[str] = ()
    gpus: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    as_json: bool = False
    plot: Path | None = None
    record: Path | None = None
    dry_run: bool = False


def simulate(options: SimulateOptions) -> int:
    """Check, simulate, show. Returns the exit code."""
    config = load(options.files, options.settings)
    kinds = _kinds(options)
    _refuse_plot(options.plot)
    from tailrace.sim.assumptions import assumptions

    if options.gpus and config.costs.measured:
        raise UsageError(
            "--gpus has no meaning with measured [costs], which are of the processes in [local]; "
            f"write --local.replicas instead, which is {config.local.replicas}"
        )
    if options.gpus and config.kinds:
        raise UsageError("--gpus has no meaning with several kinds of card; write --cluster.cards.NAME.gpus instead")
    if config.costs.measured and not config.local.replicas:
        raise UsageError("local.replicas is 0, so there is nobody to simulate; write --local.replicas 1 or more")
    rows = _rows(config, options.gpus or [config.cluster.gpus], kinds)
    if options.record:
        _refuse_record(options.record, rows)
    for sentence in assumptions(config):
        _note(sentence)
    if options.dry_run:
        output(render(rows[0] if len(rows) == 1 else config))
        return 0
    return _simulate_and_show(options, config, rows)


# --------------------------------------------------------------------------------------------------- what is meant


def _kinds(options: SimulateOptions) -> list[str]:
    """The schedules asked for by name; none means all that can run."""
    chosen = any(word.partition("=")[0] == "--schedule.kind" for word in options.settings)
    if options.schedules is None:
        return [load(options.files, options.settings).schedule.kind] if chosen else []
    if chosen:
        raise UsageError("--schedules and --schedule.kind both choose schedules; write one of them")
    for name in options.schedules:
        if name not in SCHEDULES:
            advice = meant("schedule.kind", name, SCHEDULES) or f"there are {', '.join(SCHEDULES)}"
            raise UsageError(f"--schedules has '{name}', which is no schedule; {advice}")
    if not options.schedules:
        raise UsageError(f"--schedules names no schedule; there are {', '.join(SCHEDULES)}")
    return [kind for kind in SCHEDULES if kind in options.schedules]


def _rows(config: Config, gpus: Sequence[int], kinds: Sequence[str]) -> list[Config]:
    """One checked config per simulation."""
    _note_scaling(config, gpus)
    rows: list[Config] = []
    for count in gpus:
        own = _checked(_resized(config, count) | {"schedule.kind": kinds[0] if kinds else config.schedule.kind}, config)
        for kind in kinds or SCHEDULES:
            if kind == own.schedule.kind:
                rows.append(own)
                continue
            try:
                rows.append(_checked(_resized(config, count) | {"schedule.kind": kind}, config))
            except ConfigError as error:
                if kinds:
                    raise
                _note(f"{kind} on {own.size} is left out: {error}")
    return rows


def _checked(values: dict[str, Any], config: Config) -> Config:
    from tailrace.lengths import LengthLaw
    from tailrace.sim.cost_model import check_fit

    row = with_values(config, values)
    check_fit(row)
    LengthLaw(row.workload, row.run.seed)  # refuses figures that no law has, and files that cannot be read
    return row


def _resized(config: Config, gpus: int) -> dict[str, Any]:
    """A cluster of another size; what is given for the whole of it grows or shrinks alike, in units that can work."""
    factor = gpus / config.cluster.gpus
    if factor == 1:
        return {"cluster.gpus": gpus}
    units = {"split.trainer_gpus": config.split.trainer_parallel, "schedule.max_inflight": 1}
    given = {key: read(config, key) for key in units}
    scaled = {key: max(units[key], round(given[key] * factor / units[key]) * units[key]) for key in units if given[key]}
    return {"cluster.gpus": gpus, **scaled}


def _note_scaling(config: Config, gpus: Sequence[int]) -> None:
    for key in ("split.trainer_gpus", "schedule.max_inflight"):
        sizes = [(count, _resized(config, count).get(key)) for count in gpus]
        scaled = [f"{value:,} on {count:,}" for count, value in sizes if value]
        if scaled:
            given = f"{read(config, key):,} on {config.cluster.gpus:,} GPUs"
            _note(f"{key} ({given}) grows with the cluster: {', '.join(scaled)}")


def _note(text: str) -> None:
    log.info("note: %s", text)


# ---------------------------------------------------------------------------------------------------------- refusing


def _refuse_record(folder: Path, rows: Sequence[Config]) -> None:
    from tailrace.store.journal import refuse_existing

    if len(rows) != 1:
        raise UsageError(
            f"--record keeps the journal of one simulation, but these are {len(rows)}; "
            "pick one schedule and one GPU count, for example --schedules trajectory --gpus 64"
        )
    refuse_existing(folder)


def _refuse_plot(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".html"):
        raise UsageError(f"--plot {path} has an unknown ending; write a name that ends in .png or .html")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path} is in a directory that does not exist; make it first, or name another")
    if path.is_dir():
        raise UsageError(f"--plot {path} is a directory; name a file in it")
    if path.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise UsageError("drawing a .png needs matplotlib; install tailrace[plot], or write --plot out.html")


# ------------------------------------------------------------------------------------------------ running and showing


def _simulate_and_show(options: SimulateOptions, config: Config, rows: Sequence[Config]) -> int:
    """The exit code: 2 if some fleet was lost."""
    import msgspec

    from tailrace.sim.sweep import describe

    outcomes = _run(options, rows)
    results = [msgspec.to_builtins(outcome.result) for outcome in outcomes if outcome.result]
    lost = [f"{describe(row)}: {one.lost}" for row, one in zip(rows, outcomes, strict=True) if one.lost]
    if lost and not results:
        from tailrace.sim.simulation import FleetLostError

        raise FleetLostError(lost[0] + (f" (and {len(lost) - 1} more were lost)" if len(lost) > 1 else ""))
    for sentence in lost:
        log.warning("%s", sentence)
    for row, outcome in zip(rows, outcomes, strict=True):
        _note_dropped(row, outcome.result)
    if options.plot:
        from tailrace.obs.plots import draw

        timelines = {each.result.schedule: each.timeline for each in outcomes if each.result and each.timeline}
        _write_plot(draw, options.plot, results, timelines, _title(config))
    if options.as_json:
        output(msgspec.json.encode({"config": config, "results": results, "lost": lost}).decode())
    else:
        from tailrace.obs.tables import print_results

        print_results(results, f"{_title(config)}: ", sys.stdout, config.size if config.costs.measured else "")
    if options.record:
        log.info("recorded in %s", options.record)
    return 2 if lost else 0


def _note_dropped(row: Config, result: Any) -> None:
    """Peers that are simulated here do not drop: whoever describes one should see it."""
    from tailrace.sim.sweep import describe

    share = result.dropped / (result.trained + result.dropped) if result and result.dropped else 0.0
    if share > DROPPED:
        _note(
            f"{describe(row)} drops {100 * share:.0f} % of its groups, which are older than schedule.max_staleness = "
            f"{row.schedule.max_staleness}; fewer schedule.steps_ahead waste less, and a system that drops nothing is "
            "described by a bound that nothing reaches, such as 1000"
        )


def _write_plot(draw: Any, path: Path, *what: Any) -> None:
    try:
        draw(path, *what)
    except OSError as error:
        raise UsageError(f"--plot {path} cannot be written ({error.strerror}); name another file") from error


def _run(options: SimulateOptions, rows: Sequence[Config]) -> list[Any]:
    from tailrace.obs.progress import Progress
    from tailrace.sim import sweep

    smallest = min(row.cluster.gpus for row in rows)
    timelines = [options.plot is not None and row.cluster.gpus == smallest for row in rows]
    with Progress("simulating") as progress:
        if not options.record:
            return sweep.sweep(rows, timelines, progress)
        (row,) = rows
        with _journal(options.record, row) as journal:
            steps = lambda done: progress(done, row.run.steps, sweep.describe(row))  # noqa: E731
            return [sweep.simulate(row, journal.record, timelines[0], steps)]


def _journal(folder: Path, config: Config) -> Any:
    from tailrace.store.journal import JournalWriter

    return JournalWriter(folder, config)


def _title(config: Config) -> str:
    if config.run.name or config.model.preset:
        return config.run.name or config.model.preset
    return "measured costs" if config.costs.measured else f"{config.model.parameters / 1e9:.3g}B parameters"
