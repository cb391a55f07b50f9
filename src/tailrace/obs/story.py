"""The life of one trajectory, group, replica, relay, version or prompt, told from the journal.

`story(entries, "t17")` folds the `Chronicle` over a recorded run: the sentences about the one asked for are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tailrace.errors import TailraceError
from tailrace.obs.chronicle import Chronicle, Subject, counted, plural, span, under
from tailrace.protocol import Command, Event
from tailrace.types import label, parse_label

if TYPE_CHECKING:
    from tailrace.store.trajectories import KnownTrajectory


class StoryError(TailraceError):
    """An id that the run does not have."""


class Line(NamedTuple):
    now: float
    text: str


class Recorded(Protocol):
    """What a story is told from: an entry of the journal."""

    @property
    def now(self) -> float: ...
    @property
    def event(self) -> Event: ...
    @property
    def commands(self) -> Sequence[Command]: ...


def story(entries: Iterable[Recorded], name: str) -> list[Line]:
    """Every sentence about one part, in order. StoryError if the run has no such part."""
    subject = parse_label(name)
    chronicle = Chronicle()
    lines: list[Line] = []
    numbers: set[int] = set()
    now = 0.0
    for entry in entries:
        now = entry.now
        for about, sentence in chronicle.tell(entry.event, entry.commands):
            if about == subject:
                lines.append(Line(now, sentence))
            if about[0] == subject[0]:
                numbers.add(about[1])
    lines += [Line(now, sentence) for about, sentence in chronicle.summary() if about == subject]
    if not lines:
        raise StoryError(_unknown(subject, numbers))
    return lines


def render_story(lines: Iterable[Line]) -> str:
    return "\n".join(f"{line.now:>10,.1f} s  {line.text}" for line in lines)


def render_known(known: Iterable[KnownTrajectory]) -> str:
    """What a real run knows of a trajectory, or of those of a group or prompt."""
    return "\n".join(f"     now      {_known(one)}" for one in known)


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
