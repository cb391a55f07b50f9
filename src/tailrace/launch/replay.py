"""`tailrace replay`: a journal through a fresh control plane. Exit code 1: some command is another one now."""

from __future__ import annotations

import logging
from pathlib import Path

from tailrace.logs import output
from tailrace.obs.progress import Progress
from tailrace.release import __version__
from tailrace.sim.replay import render_difference, replay
from tailrace.store.journal import Journal

log = logging.getLogger(__name__)


def replay_run(run: Path) -> int:
    journal = Journal(run)
    with Progress("replaying") as progress:
        replayed = replay(journal.entries(), journal.begun, lambda done: progress(done, 0, "events"))
    if not journal.complete:
        log.info("note: the journal ends without a clean end: the run was interrupted, or goes on")
    if replayed.difference is None:
        output(f"{replayed.events:,} events gave the same commands")
        return 0
    output(render_difference(replayed.difference))
    writer = journal.meta.get("tailrace", "?")
    output(f"written by tailrace {writer}, replayed by {__version__}: control has changed since, or the journal has")
    return 1
