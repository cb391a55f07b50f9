"""Follows a run through its folder: reads what is new in `run.db`, a slice at a time, and keeps the newest figures.

`Follower.start` lets a thread poll, less often while nobody looks; `latest` is what the page serves, bytes that are
ready to be sent.
A poll opens the file read-only and closes it again, so the run never waits for us, whatever becomes of this process.
What cannot be read is told on the page, and tried again. A folder that holds another run now is read from its start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.obs.ending import ending_of
from tailrace.obs.summary import held_out
from tailrace.page.figures import Figures, RunState
from tailrace.page.timeline import TimelineQuery, TimelineView, timeline
from tailrace.store.database import JournalError, file_of
from tailrace.store.journal import Journal
from tailrace.store.metrics import measurements
from tailrace.types import RIGHT_ABOVE

log = logging.getLogger(__name__)

POLL_S = 1.0
UNSEEN_S = 5.0  # between two polls while nobody looks
SLICE = 1000  # events that are folded at once; a reader of the page waits for no more


class PageContent(NamedTuple):
    tag: str  # changes with the content
    content: bytes


class Follower:
    def __init__(self, run: Path) -> None:
        """JournalError if there is no run to follow."""
        self._run = run
        self._begin(Journal(run))
        self._latest = PageContent("", b"{}")
        self._shown: RunState | None = None
        self._written: tuple[int, ...] = ()
        self._trouble = ""
        self._stopping = threading.Event()
        self._looked_at = threading.Event()
        self._folding = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self.poll()

    def start(self) -> None:
        self._thread.start()

    @property
    def latest(self) -> PageContent:
        self._looked_at.set()
        return self._latest

    def stop(self) -> None:
        self._stopping.set()
        self._looked_at.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10 * POLL_S)

    def timeline(self, asked: TimelineQuery) -> TimelineView:
        """Asked for by other threads."""
        with self._folding:
            return timeline(self._figures.live, asked)

    def _follow(self) -> None:
        more = True
        while not self._stopping.wait(0 if more else POLL_S):
            if not more:
                self._looked_at.wait(UNSEEN_S - POLL_S)
                self._looked_at.clear()
            more = self.poll()

    def poll(self) -> bool:
        """Take in what is new; whether there may be more."""
        read = self._figures.read, self._measured
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
        about = self._about(more)
        if about != self._shown or (self._figures.read, self._measured) != read:
            self._show(about)
        return more

    # --------------------------------------------------------------------------------------------------------- reading

    def _begin(self, journal: Journal) -> None:
        self._meta = journal.meta
        self._figures = Figures(journal.config)
        self._measured = 0

    def _read(self) -> bool:
        written = _written(file_of(self._run))
        if written == self._written:
            return False
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
        self._written = written if count < SLICE else ()
        return count == SLICE

    # --------------------------------------------------------------------------------------------------------- showing

    def _show(self, about: RunState) -> None:
        self._shown = about
        content = msgspec.json.encode(self._figures.shown(about))
        self._latest = PageContent(f'"{hashlib.sha256(content).hexdigest()[:32]}"', content)

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


def _written(path: Path) -> tuple[int, ...]:
    """When the run wrote last: to its file, or to the log beside it. Taken before reading: what comes then is read the
    next time."""
    found: list[int] = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):
            found += [each.stat().st_ino, each.stat().st_mtime_ns, each.stat().st_size]
    return tuple(found)
