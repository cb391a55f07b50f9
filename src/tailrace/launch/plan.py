"""`tailrace plan`: the planner's search, and its plan as text or JSON."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from tailrace.config import Config, load
from tailrace.logs import output

log = logging.getLogger(__name__)


class PlanGoal(NamedTuple):
    """What `--budget` (dollars an hour) and `--throughput` (tokens/s) say; both None: use what there is."""

    budget: float | None = None
    throughput: float | None = None


def plan(files: Sequence[str], settings: Sequence[str], as_json: bool, goal: PlanGoal = PlanGoal()) -> int:
    config = load(files, settings)  # mistakes are told before the planner is imported
    from tailrace.sim.assumptions import assumptions

    for sentence in assumptions(config):
        log.info("note: %s", sentence)
    if config.kinds or goal != PlanGoal():
        found, text = _of_a_fleet(config, files, goal)
    else:
        found, text = _of_one_kind(config, files)
    if as_json:
        import json

        output(json.dumps(found))
    else:
        output(text)
    return 0


def _of_one_kind(config: Config, files: Sequence[str]) -> tuple[dict[str, Any], str]:
    from tailrace import planner
    from tailrace.obs.progress import Progress

    with Progress("planning") as progress:
        found = planner.plan(config, progress)
    return planner.plan_json(found, files), planner.render_plan(found, files)


def _of_a_fleet(config: Config, files: Sequence[str], goal: PlanGoal) -> tuple[dict[str, Any], str]:
    from math import inf

    from tailrace.obs.progress import Progress
    from tailrace.planner.fleet_plan import plan_fleet
    from tailrace.planner.fleet_program import FleetGoal
    from tailrace.planner.fleet_report import fleet_plan_json, render_fleet_plan

    asked = FleetGoal(inf if goal.budget is None else goal.budget, goal.throughput or 0.0)
    with Progress("planning") as progress:
        found = plan_fleet(config, asked, progress)
    return fleet_plan_json(found, files), render_fleet_plan(found, files)
