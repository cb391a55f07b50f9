"""`tailrace trace`: a run as a file that Perfetto opens."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from tailrace.errors import UsageError
from tailrace.obs.live import LiveRun
from tailrace.obs.trace import trace_events
from tailrace.store.journal import Journal

log = logging.getLogger(__name__)


def write_trace(run: Path, out: Path) -> int:
    journal = Journal(run)
    live = LiveRun(journal.config, log=True)
    for entry in journal.entries():
        live.see(entry.now, entry.event, entry.commands)
    try:
        with out.open("wb") as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(trace_events(live, journal.path.parent.resolve().name)):
                file.write((b",\n" if number else b"\n") + msgspec.json.encode(event))
            file.write(b"\n]}\n")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); name another file") from error
    log.info("saved in %s; open it at https://ui.perfetto.dev, which keeps it in the browser", out)
    return 0
