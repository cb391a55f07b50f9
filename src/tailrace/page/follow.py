"""Follows a run through its folder: reads what is new in `run.db`, a slice at a time, and keeps the newest figures.

`Follower.start` lets a thread poll; `latest` is what the page serves, bytes that are ready to be sent.
A poll opens the file read-only and closes it again, so the run never waits for us, whatever becomes of this process.
What cannot be read is told on the page, and tried again. A folder that holds another run now is read from its start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.obs.ending import ending_of
from tailrace.obs.summary import held_out
from tailrace.page.figures import Figures, RunState
from tailrace.page.timeline import TimelineQuery, TimelineView, timeline
from tailrace.store.database import JournalError
from tailrace.store.journal import Journal
from tailrace.store.metrics import measurements
from tailrace.types import RIGHT_ABOVE

log = logging.getLogger(__name__)

POLL_S = 1.0
SLICE = 1000  # events that are folded at once; a reader of the page waits for no more


class PageContent(NamedTuple):
    tag: str  # changes with the content
    content: bytes


class Follower:
    def __init__(self, run: Path) -> None:
        """JournalError if there is no run to follow."""
        self._run = run
        self._begin(Journal(run))
        self.latest = PageContent("", b"{}")
        self._trouble = ""
        self._stopping = threading.Event()
        self._folding = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self.poll()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10 * POLL_S)

    def timeline(self, asked: TimelineQuery) -> TimelineView:
        """Asked for by other threads."""
        with self._folding:
            return timeline(self._figures.live, asked)

    def _follow(self) -> None:
        more = True
        while not self._stopping.wait(0 if more else POLL_S):
            more = self.poll()

    def poll(self) -> bool:
        """Take in what is new; whether there may be more."""
        try:
            with self._folding:
                more, trouble = self._read(), ""
        except (JournalError, OSError) as error:
            more, trouble = False, str(error)
        except Exception as error:  # an entry that nobody of ours wrote: this is the thread's border
            more, trouble = False, f"event {self._figures.read + 1} cannot be folded ({type(error).__name__}: {error})"
            if trouble != self._trouble:
                log.exception("%s", trouble)
        self._trouble = trouble
        self._show(more)
        return more

    # --------------------------------------------------------------------------------------------------------- reading

    def _begin(self, journal: Journal) -> None:
        self._meta = journal.meta
        self._figures = Figures(journal.config)
        self._measured = 0

    def _read(self) -> bool:
        journal = Journal(self._run)
        if journal.meta.get("created") != self._meta.get("created"):
            self._begin(journal)  # another run is there now
        elif journal.meta.get("config") != self._meta.get("config"):
            self._figures.live.config = journal.config  # resumed, for more steps perhaps
        self._meta = journal.meta
        count = 0
        for entry in journal.entries(self._figures.read, SLICE):
            self._figures.see(entry)
            count += 1
        for one in measurements(self._run, self._measured):
            self._figures.measure(one)
            self._measured += 1
        return count == SLICE

    # --------------------------------------------------------------------------------------------------------- showing

    def _show(self, behind: bool) -> None:
        content = msgspec.json.encode(self._figures.shown(self._about(behind)))
        self.latest = PageContent(f'"{hashlib.sha256(content).hexdigest()[:32]}"', content)

    def _about(self, behind: bool) -> RunState:
        meta, config = self._meta, self._figures.live.config
        folder = self._run if self._run.is_dir() else self._run.parent
        return RunState(
            name=config.run.name or os.fsencode(folder.resolve().name).decode(errors="replace"),
            created=meta.get("created", ""),
            ended=ending_of(meta, folder, self._figures.live.stop),
            accuracy=held_out(meta, "accuracy"),
            mean_reward=held_out(meta, "reward"),
            right_above=RIGHT_ABOVE,
            behind=behind,
            trouble=self._trouble,
        )
