"""The runs that a page shows, by number: those that were named, and those in folders that were named.

A run is followed from the moment that somebody looks at it, and at most `FOLLOWED` are at once: who was looked at least
recently is read anew the next time. What a request names is a number in this list, never a path.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import msgspec

from tailrace.browse.conditions import SampleFilter
from tailrace.browse.decoding import TokenDecoder, decoder_of
from tailrace.browse.listing import find_samples
from tailrace.config.tree import Config
from tailrace.errors import TailraceError
from tailrace.obs.ending import RunEnding, ending_of
from tailrace.page.follow import Follower
from tailrace.store.database import DAMAGE, FILE, JournalError, has_table, reading
from tailrace.store.journal import Journal

FOLLOWED = 6
MOST_RUNS = 500
NEWEST = (
    "SELECT step, value FROM metrics WHERE source = 'trainer' AND name = 'reward' AND value IS NOT NULL "
    "ORDER BY rowid DESC LIMIT ?"
)


class ListedRun(msgspec.Struct, frozen=True):
    number: int
    name: str
    created: str
    schedule: str
    steps: int  # that it is to have
    ended: RunEnding
    done: int = 0  # steps that it has trained
    reward: float | None = None  # of the last of them
    accuracy: tuple[float | None, float | None] = (None, None)  # before and after, held out
    trouble: str = ""


class RunLibrary:
    def __init__(self, paths: Sequence[Path]) -> None:
        """JournalError if there is no run to show."""
        self._named = paths
        self._paths: list[Path] = []
        self._followers: OrderedDict[int, Follower] = OrderedDict()
        self._decoders: dict[int, TokenDecoder] = {}
        self._lock = threading.RLock()
        self._look()
        if not self._paths:
            raise JournalError(
                f"there is no run in {paths[0]}; name the directory of a run, or one that has runs in it"
            )

    def path(self, number: int) -> Path:
        with self._lock:
            if number >= len(self._paths):
                raise JournalError(f"there is no run {number} here; there are {len(self._paths)}")
            return self._paths[number]

    def config(self, number: int) -> Config:
        return Journal(self.path(number)).config

    def warm_up(self) -> None:
        """What the first look at samples would wait for, by a thread: nobody may ever look."""
        threading.Thread(target=self._warm_up, name="warm-up", daemon=True).start()

    def _warm_up(self) -> None:
        with suppress(TailraceError):  # whoever looks is told
            self.decoder(0)
            find_samples(self.path(0), SampleFilter(state="stale"))  # it reads all that filters compare, from the disk

    def decoder(self, number: int) -> TokenDecoder:
        """Loaded once; one that knows no tokenizer is tried again."""
        with self._lock:
            found = self._decoders.get(number)
            if found is None or not found.known:
                path = self.path(number)
                found = self._decoders[number] = decoder_of(self.config(number), path)
            return found

    def follower(self, number: int) -> Follower:
        with self._lock:
            found = self._followers.pop(number, None)
            if found is None:
                found = Follower(self.path(number))
                found.start()
            self._followers[number] = found
            left = self._followers.popitem(last=False)[1] if len(self._followers) > FOLLOWED else None
        if left is not None:
            left.stop()
        return found

    def followed_to_the_end(self, number: int) -> Follower:
        """All of its history is read, once, by this thread."""
        found = Follower(self.path(number))
        while found.poll():
            pass
        with self._lock:
            self._followers[number] = found
        return found

    def looked_at(self) -> Sequence[int]:
        """The last one last."""
        with self._lock:
            return tuple(self._followers)

    def list(self) -> list[ListedRun]:
        self._look()
        with self._lock:
            paths = list(enumerate(self._paths))
        return [_listed(number, path) for number, path in paths]

    def stop(self) -> None:
        with self._lock:
            for follower in self._followers.values():
                follower.stop()

    def _look(self) -> None:
        """New ones come to the end, so that numbers stay."""
        found = [run for path in self._named for run in _runs_in(path)]
        with self._lock:
            new = [run for run in dict.fromkeys(found) if run not in self._paths]
            self._paths += new[: MOST_RUNS - len(self._paths)]


def _runs_in(path: Path) -> list[Path]:
    """The run itself, or all in a folder that is none, the newest first."""
    if not path.is_dir() or (path / FILE).exists():
        Journal(path)
        return [path]
    inside = [each for each in path.iterdir() if (each / FILE).is_file()]
    return sorted(inside, key=lambda each: -(each / FILE).stat().st_mtime)


def _listed(number: int, path: Path) -> ListedRun:
    try:
        journal = Journal(path)
        config, folder = journal.config, journal.path.parent
        ended = ending_of(journal.meta, folder, None)
        created = journal.meta.get("created", "")
        done, reward = _newest(journal.path, config.trainer.mini_batches)
        accuracy = (_number(journal, "accuracy_before"), _number(journal, "accuracy_after"))
        kind, steps = config.schedule.kind, config.run.steps
        return ListedRun(number, _name(path, config), created, kind, steps, ended, done, reward, accuracy)
    except (JournalError, OSError, ValueError, *DAMAGE) as error:
        return ListedRun(number, path.name, "", "", 0, RunEnding("interrupted", ""), trouble=str(error))


def _newest(path: Path, mini_batches: int) -> tuple[int, float | None]:
    """Steps that are trained, and the mean reward of the last one: among the newest rows, so nothing is searched."""
    with reading(path) as connection:
        if not has_table(connection, "metrics"):
            return 0, None
        rows = connection.execute(NEWEST, (2 * mini_batches,)).fetchall()
    rewards: dict[int, list[float]] = {}
    for step, value in rows:
        rewards.setdefault(step, []).append(value)
    last = max((step for step, each in rewards.items() if len(each) >= mini_batches), default=None)
    return (0, None) if last is None else (last + 1, fmean(rewards[last]))


def _number(journal: Journal, key: str) -> float | None:
    return float(journal.meta[key]) if key in journal.meta else None


def _name(path: Path, config: Config) -> str:
    folder = path if path.is_dir() else path.parent
    return config.run.name or folder.resolve().name
