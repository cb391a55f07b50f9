"""The journal through a fresh control plane: the same events must give the same commands.

This is how a run proves that control is pure, how a bug report is reproduced, and how a change of the control plane
shows what it changed. It needs only the journal's entries and settings: no clock, no components, no cost model. A
controller that died and was restored in the run is an event like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol

import msgspec

from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.protocol import Command, Event

TOLD_EVERY = 10_000  # events between two words of progress
WIDTH = 240  # characters of a message that are shown
LINES = 30  # of a difference


class ReplayEntry(Protocol):
    """An entry of the journal."""

    @property
    def seq(self) -> int: ...
    @property
    def now(self) -> float: ...
    @property
    def event(self) -> Event: ...
    @property
    def commands(self) -> Sequence[Command]: ...


class Difference(NamedTuple):
    """The first event whose commands are not those of the journal. `failure`: what the control plane raised."""

    seq: int
    now: float
    event: Event
    expected: list[Command]
    got: list[Command]
    failure: str = ""


class Replayed(NamedTuple):
    """How many events were compared, and the first difference, if there is one."""

    events: int
    difference: Difference | None


def replay(entries: Iterable[ReplayEntry], config: Config, progress: Callable[[int], None] | None = None) -> Replayed:
    """Stops at the first difference: what comes after it only follows from it."""
    plane = ControlPlane(config)
    count = 0
    for count, entry in enumerate(entries, start=1):
        difference = _compare(plane, entry)
        if difference:
            return Replayed(count, difference)
        if progress and count % TOLD_EVERY == 0:
            progress(count)
    return Replayed(count, None)


def _compare(plane: ControlPlane, entry: ReplayEntry) -> Difference | None:
    expected = list(entry.commands)
    try:
        got = plane.handle(entry.now, entry.event)
    except Exception as error:  # a journal may hold anything: whatever control raises is a difference to show
        failure = f"{type(error).__name__}: {error}"
        return Difference(entry.seq, entry.now, entry.event, expected, [], failure)
    return None if got == expected else Difference(entry.seq, entry.now, entry.event, expected, got)


def render_difference(difference: Difference) -> str:
    """The event, then the commands of the journal above those that came now; `=` where they agree."""
    lines = [f"event {difference.seq} at {difference.now:.3f} s: {_excerpt(_text(difference.event))}"]
    if difference.failure:
        return "\n".join([*lines, f"  now      {difference.failure}"])
    for expected, got in zip_longest(difference.expected, difference.got):
        lines += _pair(_text(expected), _text(got))
    return "\n".join(lines if len(lines) <= LINES else [*_around_first_difference(lines), "  ..."])


def _pair(expected: str, got: str) -> list[str]:
    if expected == got:
        return [f"  =        {_excerpt(expected)}"]
    at = next((index for index, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), 0)
    return [f"  journal  {_excerpt(expected, at)}", f"  now      {_excerpt(got, at)}"]


def _around_first_difference(lines: list[str]) -> list[str]:
    """The event, and as much as fits from just before the first pair that differs."""
    first = next(index for index, line in enumerate(lines) if line.startswith("  journal"))
    start = max(1, first - LINES // 2)
    return [lines[0], *(["  ..."] if start > 1 else []), *lines[start : start + LINES - 1]]


def _excerpt(text: str, at: int = 0) -> str:
    """So much of a long message as a person reads: its beginning, and the index that matters."""
    if len(text) <= WIDTH:
        return text
    if at <= WIDTH // 2:
        return f"{text[:WIDTH]}... ({len(text):,} characters)"
    return f"{text[: WIDTH // 4]} ... {text[at - WIDTH // 4 : at + WIDTH // 2]}... ({len(text):,} characters)"


def _text(message: Event | Command | None) -> str:
    return msgspec.json.encode(message).decode() if message is not None else "(no command)"
