"""search.db, beside run.db: samples by their words and by what filters compare, and how each prompt did at each visit.

It is derived from the journal and the files of the stores, and can be deleted at any time. Whoever writes it is neither
the run nor its store: a process of low priority (`indexing`), or the command that needs it. There is one writer at a
time (`search.lock`); any number of readers look at what is committed.

    meta(key, value)        format; run: whose samples these are; read: the last event that was taken in
    completions, questions  FTS5 without content: words and their places; the text itself stays in the store
    settled, unsettled      what filters compare (`settled`)
    visits(prompt, row, version, samples, passed, failed, rewards)    samples of each prompt id: how many, and how good

A document has the number of its sample and attempt: one that was generated anew is another document, and what is left
of the older one matches no sample any more.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.browse.decoding import TokenDecoder, decoder_of
from tailrace.browse.index_file import INDEX, BrowseError, document, make_index, refuse_unknown_index, run_id
from tailrace.browse.sample import completion_text
from tailrace.browse.settled import settle
from tailrace.browse.tokens import SampleTokens, read_tokens
from tailrace.protocol import AnyEvent, Event, Finished, PromptsAdded, SampleFailed
from tailrace.store.database import DAMAGE, JournalError, connect_to_read, file_of, reading, reason
from tailrace.store.folder import PRIVATE
from tailrace.store.journal import Journal
from tailrace.store.trajectories import KnownTrajectory, failed_attempts, trajectories_among
from tailrace.types import RIGHT_ABOVE

LOCK = "search.lock"
BATCH = 500  # events whose samples are read and written at once: bounds the memory
CACHE = 32 << 20  # bytes
WANTED = "SELECT seq, event FROM journal WHERE seq > ? AND kind IN ('Finished', 'SampleFailed', 'PromptsAdded') "
ADD_VISIT = """
INSERT INTO visits (prompt, row, version, samples, passed, failed, rewards) VALUES (?, -1, ?, 1, ?, ?, ?)
ON CONFLICT (prompt) DO UPDATE SET samples = samples + 1, version = max(version, excluded.version),
    passed = passed + excluded.passed, failed = failed + excluded.failed, rewards = rewards + excluded.rewards
"""
ADD_PROMPT = """
INSERT INTO visits (prompt, row, version, samples, passed, failed, rewards) VALUES (?, ?, -1, 0, 0, 0, 0.0)
ON CONFLICT (prompt) DO UPDATE SET row = excluded.row
"""


class IndexState(NamedTuple):
    """How far the index has come."""

    read: int  # events
    bytes: int
    samples: int  # that it has


class SearchIndex:
    """The one writer. `update` takes in what is new, a batch at a time."""

    def __init__(self, run: Path) -> None:
        """JournalError if there is no run; BrowseError if somebody else writes its index."""
        self._journal = Journal(run)
        self._path = self._journal.path.parent / INDEX
        self._run = run
        self._lock = _locked(self._path.with_name(LOCK))
        self._decoder: TokenDecoder | None = None
        self._connection = self._opened()
        (self.read,) = map(int, self._connection.execute("SELECT value FROM meta WHERE key = 'read'").fetchone())

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        os.close(self._lock)

    def update(self) -> bool:
        """Take in one batch; whether there was anything. What filters compare is soon done, and comes before words."""
        if self._settle():
            return True
        events = self._events()
        if not events:
            return False
        ended = [one for _, one in events if isinstance(one, Finished | SampleFailed)]
        samples = self._samples(ended)
        tokens = dict(zip(samples, read_tokens(self._run, list(samples.values())), strict=True))
        with self._connection:
            for _, event in events:
                self._take_in(event, samples, tokens)
            self.read = events[-1][0]
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'read'", (str(self.read),))
        return True

    # --------------------------------------------------------------------------------------------------------- reading

    def _settle(self) -> bool:
        try:
            with reading(self._journal.path) as run, self._connection:
                return settle(self._connection, run)
        except DAMAGE as error:
            raise JournalError(f"{self._journal.path} is damaged: {reason(error)}") from error

    def _events(self) -> list[tuple[int, Event]]:
        decode = msgspec.json.Decoder(AnyEvent).decode
        try:
            with reading(self._journal.path) as connection:
                rows = connection.execute(f"{WANTED} ORDER BY seq LIMIT ?", (self.read, BATCH)).fetchall()
            return [(seq, decode(event)) for seq, event in rows]
        except (*DAMAGE, msgspec.MsgspecError) as error:
            raise JournalError(f"{self._journal.path} is damaged: {reason(error)}") from error

    def _samples(self, ended: list[Finished | SampleFailed]) -> dict[tuple[int, int], KnownTrajectory]:
        """By trajectory and attempt: the attempts that they are at, and those that failed."""
        ids = [_key(event)[0] for event in ended]
        known = [*trajectories_among(self._run, ids), *failed_attempts(self._run, ids)]
        return {(one.id, one.attempt): one for one in known}

    # --------------------------------------------------------------------------------------------------------- writing

    def _take_in(
        self,
        event: Event,
        samples: dict[tuple[int, int], KnownTrajectory],
        tokens: dict[tuple[int, int], SampleTokens],
    ) -> None:
        execute = self._connection.execute
        if isinstance(event, PromptsAdded):
            for prompt in event.prompts:
                execute(ADD_PROMPT, (prompt.id, prompt.row))
        elif isinstance(event, Finished | SampleFailed) and (sample := samples.get(_key(event))) is not None:
            self._add_text(sample, event, tokens[_key(event)])
            meta = event.meta if isinstance(event, Finished) else None
            reward = (meta.reward or 0.0) if meta else 0.0
            version = meta.oldest if meta else -1
            execute(ADD_VISIT, (sample.prompt, version, reward > RIGHT_ABOVE, meta is None, reward))

    def _add_text(self, sample: KnownTrajectory, event: Finished | SampleFailed, tokens: SampleTokens) -> None:
        if self._decoder is None:
            self._decoder = decoder_of(self._journal.config, self._journal.path.parent)
        if tokens.row is not None and self._is_new(sample.prompt):
            text = self._decoder.text(tokens.row.ids.tolist())
            self._connection.execute("INSERT INTO questions (rowid, text) VALUES (?, ?)", (sample.prompt, text))
        if tokens.stored is not None:
            text = completion_text(tokens, self._decoder)
            number = document(*_key(event))
            self._connection.execute("INSERT INTO completions (rowid, text) VALUES (?, ?)", (number, text))

    def _is_new(self, prompt: int) -> bool:
        """No sample of this visit has been taken in."""
        found = self._connection.execute("SELECT samples FROM visits WHERE prompt = ?", (prompt,)).fetchone()
        return found is None or found[0] == 0

    def _opened(self) -> sqlite3.Connection:
        """The index of this run that is there, or a new one."""
        run = run_id(self._journal.meta)
        try:
            refuse_unknown_index(self._path, run)
        except BrowseError:
            for path in (self._path, *[self._path.with_name(f"{INDEX}-{end}") for end in ("wal", "shm")]):
                path.unlink(missing_ok=True)
            make_index(self._path, run)
        connection = sqlite3.connect(self._path, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = {-CACHE // 1024}")
        return connection


def build(run: Path) -> Iterator[int]:
    """Bring the index up to date; after each batch, the last event that it has. Nothing if somebody else does it."""
    with suppress(BrowseError), closing(SearchIndex(run)) as index:
        while index.update():
            yield index.read


def state_of(run: Path) -> IndexState:
    """Zeros where there is no index yet."""
    path = file_of(run).parent / INDEX
    with suppress(BrowseError, *DAMAGE):
        refuse_unknown_index(path)
        with closing(connect_to_read(path)) as connection:
            (read,) = connection.execute("SELECT value FROM meta WHERE key = 'read'").fetchone()
            (samples,) = connection.execute("SELECT coalesce(sum(samples), 0) FROM visits").fetchone()
        return IndexState(int(read), path.stat().st_size, samples)
    return IndexState(0, 0, 0)


def _key(event: Finished | SampleFailed) -> tuple[int, int]:
    return (event.meta.id, event.meta.attempt) if isinstance(event, Finished) else (event.trajectory, event.attempt)


def _locked(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
    except OSError as error:
        raise BrowseError(f"the text index cannot be written beside the run ({error.strerror})") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BrowseError("another process writes the text index of this run") from None
    return handle
