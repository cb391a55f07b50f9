"""`tailrace plan`: the planner's search, and its plan as text or JSON."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tailrace.config import load
from tailrace.logs import output

log = logging.getLogger(__name__)


def plan(files: Sequence[str], settings: Sequence[str], as_json: bool) -> int:
    config = load(files, settings)  # mistakes are told before the planner is imported
    from tailrace import planner
    from tailrace.obs.progress import Progress
    from tailrace.sim.assumptions import assumptions

    for sentence in assumptions(config):
        log.info("note: %s", sentence)
    with Progress("planning") as progress:
        found = planner.plan(config, progress)
    if as_json:
        import json

        output(json.dumps(planner.plan_json(found, files)))
    else:
        output(planner.render_plan(found, files))
    return 0
