"""Who is held up by whom: what components say of themselves with their heartbeats, made readable.

A component that waits for a slow store goes on and waits again, several times a second. Here it counts as waiting until
it has not waited for `CALM_S`, and all that begin to wait for the same store are one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

CALM_S = 3.0
NAMED = 5  # components in a sentence


class Change(NamedTuple):
    """Components that begin to wait for something, or no longer do."""

    components: tuple[str, ...]
    subject: str  # what they wait for: "store 0"
    began: bool
    detail: str = ""

    def __str__(self) -> str:
        names, many = _names(self.components), len(self.components) > 1
        if not self.began:
            return f"{names} no longer {'wait' if many else 'waits'} for {self.subject}"
        return f"{names} {'wait' if many else 'waits'} for {self.subject}" + (f": {self.detail}" if self.detail else "")


class Backpressure:
    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}  # components that are held up (r0), and by what
        self._last: dict[str, float] = {}  # when each was last seen to wait

    def look(self, now: float, found: Mapping[str, str]) -> list[Change]:
        """`found`: who says that it waits at this moment, and for what."""
        before = dict(self.waiting)
        self.waiting |= found
        self._last |= dict.fromkeys(found, now)
        calm = [name for name, last in self._last.items() if now - last >= CALM_S]
        for name in calm:
            del self._last[name], self.waiting[name]
        begun = {name: what for name, what in self.waiting.items() if _subject(before.get(name)) != _subject(what)}
        ended = {name: what for name, what in before.items() if _subject(self.waiting.get(name)) != _subject(what)}
        return [*_changes(ended, began=False), *_changes(begun, began=True)]


def _changes(components: Mapping[str, str], began: bool) -> Iterator[Change]:
    for subject in sorted({_subject(what) for what in components.values()}):
        mine = tuple(sorted([name for name, what in components.items() if _subject(what) == subject], key=_order))
        detail = components[mine[0]].partition(": ")[2]
        yield Change(mine, subject, began, detail if began else "")


def _subject(what: str | None) -> str:
    return (what or "").partition(":")[0]


def _order(name: str) -> tuple[int, str]:
    return len(name), name


def _names(components: Iterable[str]) -> str:
    names = list(components)
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
