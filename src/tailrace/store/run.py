"""The store of a real run: `run.db` with journal, trajectories, metrics and snapshots, through one connection.

The controller owns it. It calls `record` for every event, notes in `trajectories` and `metrics` what it says, and then
`commit`: one transaction, so an event, its payload and its commands are all there or none is. Only what is committed
may be acted on. After a crash `reopen` gives the state back: `newest_snapshot`, then `entries` after it.

    snapshots(seq, state, crc)   the control plane after event seq, msgpack; the newest two are kept
    heard(name, number)          the last report of every component that is in all this; it need not be sent again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self
from zlib import crc32

from tailrace.config import Config
from tailrace.protocol import Command, Event
from tailrace.store import journal, metrics, trajectories
from tailrace.store.database import FILE, Database, file_of, has_log, merge_log, refuse_existing
from tailrace.store.errors import JournalError
from tailrace.store.folder import RunFolder
from tailrace.store.journal import Entry, Journal, JournalTable, Meta
from tailrace.store.metrics import Metrics
from tailrace.store.trajectories import TrajectoryTable

SNAPSHOTS = "CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, state BLOB NOT NULL, crc INTEGER NOT NULL);"
SCHEMA = journal.SCHEMA + trajectories.SCHEMA + metrics.SCHEMA + SNAPSHOTS
HEARD = "CREATE TABLE IF NOT EXISTS heard (name TEXT PRIMARY KEY, number INTEGER NOT NULL)"
FAILED = "failed"  # in `meta`: why the run could not go on; empty once it has been resumed
KEPT_SNAPSHOTS = 2  # the older one in case that the newest is damaged


class Snapshot(NamedTuple):
    seq: int
    state: bytes


class RunStore:
    """`RunStore.create(folder, config)` for a new run, `RunStore.reopen(folder)` to go on with one. In a `with` block
    the run stays open to be resumed; `close(complete=True)` says that it came to its end."""

    def __init__(self, folder: RunFolder, config: Config, database: Database, found: Journal | None = None) -> None:
        self.run_folder = folder
        self.config = config  # that the run has had until now
        self.meta = Meta(database)
        self.trajectories = TrajectoryTable(database)
        self.metrics = Metrics(database)
        self._database = database
        database.execute(HEARD)
        self.heard: dict[str, int] = dict(database.execute("SELECT name, number FROM heard"))
        self._hearing: dict[str, int] = {}  # since the last commit
        self._found = found
        self._journal = JournalTable(database)
        self._closed = False

    @classmethod
    def create(cls, folder: Path, config: Config, driver: str = "local") -> Self:
        refuse_existing(folder)
        run_folder = RunFolder.make(folder)
        try:
            return cls(run_folder, config, Database.create(folder, SCHEMA, journal.beginning(config, driver)))
        except BaseException:
            run_folder.close()
            raise

    @classmethod
    def reopen(cls, folder: Path, complete: bool = False) -> Self:
        """`complete`: also one that came to its end; `go_on` says that it has more to do now."""
        run_folder = RunFolder(file_of(folder).parent)
        try:
            found = Journal(folder)
            _refuse_ended(folder, found, complete)
            found.check()
            return cls(run_folder, found.config, Database.reopen(found.path), found)
        except BaseException:
            run_folder.close()
            raise

    @property
    def folder(self) -> Path:
        return self.run_folder.path

    # --------------------------------------------------------------------------------------------------- writing

    @property
    def file(self) -> Path:
        return self._database.path

    @property
    def last_seq(self) -> int:
        return self._journal.last

    @property
    def last_now(self) -> float:
        """Where the clock of a resumed run goes on."""
        return self._journal.now

    def record(self, now: float, event: Event, commands: Sequence[Command]) -> int:
        return self._journal.record(now, event, commands)

    def snapshot(self, seq: int, state: bytes) -> None:
        """The state of control after event `seq`, so that a resumed run need not begin with the first event."""
        assert seq <= self.last_seq, f"snapshot of event {seq}, but {self.last_seq} is the last one"
        self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", (seq, state, crc32(state)))
        keep = "SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?"
        self._database.execute(f"DELETE FROM snapshots WHERE seq NOT IN ({keep})", (KEPT_SNAPSHOTS,))

    def hear_anew(self) -> None:
        """Nobody who ever reported is there any more; whoever comes may have the same name."""
        self._database.execute("DELETE FROM heard")
        self.heard.clear()

    def hear(self, name: str, number: int) -> None:
        """A component's report is being taken in; it counts as heard with the next commit. 0: it has no number."""
        if number:
            self._hearing[name] = number

    def begin(self) -> bool:
        """Make sure that nobody else writes until the next commit; False while somebody does. Who writes without asking
        waits for that."""
        return self._database.begin()

    def commit(self) -> dict[str, int]:
        """Returns whose reports are safe now, and up to which number."""
        heard, self._hearing = self._hearing, {}
        self._database.executemany("INSERT OR REPLACE INTO heard VALUES (?, ?)", heard.items())
        self._database.commit()
        self.heard |= heard
        return heard

    # --------------------------------------------------------------------------------------------------- resuming

    @property
    def begun(self) -> Config:
        """The settings with which its journal begins."""
        return self._found.begun if self._found else self.config

    def go_on(self, config: Config) -> None:
        """With these settings, also if it had failed or come to its end."""
        self.meta.configure(config)
        self.meta.set(FAILED, "")
        self.meta.remove("complete")
        self.commit()

    def newest_snapshot(self) -> Snapshot | None:
        """The newest that is as it was written. None is no loss: the journal has everything from the first event on."""
        rows = self._database.execute("SELECT seq, state, crc FROM snapshots ORDER BY seq DESC")
        whole = (Snapshot(seq, state) for seq, state, crc in rows if isinstance(state, bytes) and crc32(state) == crc)
        return next(whole, None)

    def entries(self, after: int = 0, most: int | None = None) -> Iterator[Entry]:
        """What a reopened run had recorded after event `after`; at most so many. Take all that you ask for: until then
        the log of the database cannot be merged."""
        return self._found.entries(after, most) if self._found else iter(())

    # ----------------------------------------------------------------------------------------------------- ending

    def close(self, complete: bool, failed: str = "") -> None:
        """Commit and close; a complete run cannot be reopened. Closing twice, or after an error, does no harm. What is
        not complete does not wait for another program that has the database locked.

        `failed`: why it could not go on, if that is so.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._database.broken and (complete or self.begin()):
                self._end(complete, failed)
        finally:
            self._database.close()
            if has_log(moved := self.run_folder.now / FILE):  # SQLite does not merge what lies elsewhere by now
                merge_log(moved)
            self.run_folder.close()

    def _end(self, complete: bool, failed: str) -> None:
        if complete:
            self.meta.set("complete", str(self.last_seq))
        if failed:
            self.meta.set(FAILED, failed)
        self.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=False)


def _refuse_ended(folder: Path, found: Journal, complete: bool) -> None:
    if found.meta.get("driver") == "simulation":
        raise JournalError(f"{folder} is a simulation, which cannot be resumed; run it again into another directory")
    if found.complete and not complete:
        steps, patience = found.config.run.steps, found.config.eval.patience
        early = f", one that stopped early with more patience (--eval.patience {2 * patience})" if patience else ""
        raise JournalError(
            f"{folder} is complete; to train it further, resume it with more steps (--run.steps {2 * steps}){early}, "
            f"or make another run of one of its checkpoints with tailrace fork {folder}"
        )
