"""What sentences about a run are made of: a subject and a text; and how versions and ranges of numbers are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tailrace.types import Version, label

Subject = tuple[str, int]
Sentences = Iterator[tuple[Subject, str]]


def under(oldest: Version, newest: Version) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def span(kind: str, numbers: Iterable[int]) -> str:
    """`t3`, `t0 to t9`, or `t0 to t90, 12 in all` where some between are missing."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return label(kind, ordered[0])
    ends = f"{label(kind, ordered[0])} to {label(kind, ordered[-1])}"
    return ends if ordered[-1] - ordered[0] + 1 == len(ordered) else f"{ends}, {len(ordered):,} in all"
