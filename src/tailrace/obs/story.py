"""The life of one trajectory, group, replica, relay, version or prompt, from the journal.

`story(entries, "t17", config)` folds a recorded run and keeps the sentences about the one asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from tailrace.config.tree import Config
from tailrace.errors import TailraceError
from tailrace.obs.event_text import EventText
from tailrace.obs.fold import Fold
from tailrace.obs.sentences import Subject, span, under
from tailrace.protocol import Command, Event
from tailrace.store.journal import Entry
from tailrace.types import label, parse_label
from tailrace.wording import counted, plain_line, plural

if TYPE_CHECKING:
    from tailrace.store.trajectories import KnownTrajectory


class StoryError(TailraceError):
    """An id that the run does not have."""


class StoryLine(NamedTuple):
    now: float
    text: str


class Story:
    """Collects what is said of one subject while a fold reads the journal."""

    def __init__(self, subject: Subject, config: Config) -> None:
        self.subject = subject
        self.fold = Fold(config, keep_trained=True)
        self.fold.before = self._describe
        self.lines: list[StoryLine] = []
        self.numbers: set[int] = set()  # of all subjects of this kind
        self._text = EventText(self.fold)
        self._now = 0.0

    def see(self, entry: Entry) -> None:
        self._now = entry.now
        self.fold.see(entry.now, entry.event, entry.commands)

    def _describe(self, message: Event | Command) -> None:
        for about, sentence in self._text.describe(message):
            if about[0] == self.subject[0]:
                self.numbers.add(about[1])
                self._add(about, sentence)

    def _add(self, about: Subject, sentence: str) -> None:
        if about == self.subject:
            self.lines.append(StoryLine(self._now, sentence))

    def add_totals(self) -> None:
        for about, sentence in self._text.totals():
            self._add(about, sentence)


def story(entries: Iterable[Entry], name: str, config: Config) -> list[StoryLine]:
    """Every sentence about one subject, in order. StoryError if the run has no such subject."""
    found = Story(parse_label(name), config)
    for entry in entries:
        found.see(entry)
    found.add_totals()
    if not found.lines:
        raise StoryError(_unknown(found.subject, found.numbers))
    return found.lines


def render_story(lines: Iterable[StoryLine]) -> str:
    return "\n".join(f"{line.now:>10,.1f} s  {plain_line(line.text)}" for line in lines)


def render_known(known: Iterable[KnownTrajectory]) -> str:
    """What a real run knows of a trajectory, or of those of a group or prompt."""
    return "\n".join(f"     now      {plain_line(_known(one))}" for one in known)


def _known(one: KnownTrajectory) -> str:
    words = [f"t{one.id}", one.state + (f" in step {one.step}" if one.step is not None else "")]
    words += [counted(one.tokens, "token")] if one.tokens is not None else []
    words += [f"tokens {one.payload}"] if one.payload == "deleted" else []
    if one.oldest is not None and one.newest is not None:
        words.append(under(one.oldest, one.newest))
    words += [one.finish] if one.finish else []
    words += [f"reward {one.reward:g}"] if one.reward is not None else []
    words += [one.reason] if one.reason else []
    return ", ".join(words)


def _unknown(subject: Subject, numbers: set[int]) -> str:
    kind, number = subject
    if not numbers:
        return f"{label(kind, number)} is not in this run, which has no {plural(kind)}"
    return f"{label(kind, number)} is not in this run; its {plural(kind)} are {span(kind, numbers)}"
