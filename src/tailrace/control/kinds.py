"""Replicas of different speed: which of them are alike, and how much of the work each should have.

Every replica reports what its engine does and how long that takes; from that follows how many tokens a second it would
decode in a batch of usual size (`rates`). Those that are about as fast, and have about as much KV, are one kind. In a
fleet of one kind everybody gets the same. Where there are several, work is dealt out by speed, and what one kind has no
room for goes to the others (`batch_sizes`), so that a sample takes about as long wherever it is generated.

Pure functions over a few numbers per replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ALIKE = 1.25  # times as fast as the slowest of a kind is the fastest of it, at most; the same with KV


class Kind(msgspec.Struct):
    pace: float = 1.0  # tokens per second of a replica, against the mean of the fleet
    kv_capacity: int = 0  # the smallest
    members: int = 0


def sort_out(rates: Sequence[float], kv_capacities: Sequence[int]) -> tuple[list[Kind], list[int]]:
    """The kinds that there are, and of which each replica is. A rate of 0 is not known: it counts as the mean."""
    known = [rate for rate in rates if rate > 0.0]
    mean = sum(known) / len(known) if known else 1.0
    rates = [rate or mean for rate in rates]
    by_rate, by_kv = _classes(rates), _classes([float(one) for one in kv_capacities])
    keys = sorted(set(zip(by_rate, by_kv, strict=True)))
    numbers = [keys.index(key) for key in zip(by_rate, by_kv, strict=True)]
    uneven = len(set(by_rate)) > 1
    overall = sum(rates) / max(1, len(rates))
    kinds = [Kind() for _ in keys]
    for number, rate, kv in zip(numbers, rates, kv_capacities, strict=True):
        kind = kinds[number]
        kind.members += 1
        kind.pace += ((rate / overall if uneven else 1.0) - kind.pace) / kind.members
        kind.kv_capacity = min(kind.kv_capacity or kv, kv)
    return kinds or [Kind()], numbers


def _classes(values: Sequence[float]) -> list[int]:
    """The number of each value's class: from the smallest on, as far as values are alike."""
    numbers: dict[float, int] = {}
    first, number = 0.0, -1
    for value in sorted(set(values)):
        if number < 0 or value > ALIKE * first:
            first, number = value, number + 1
        numbers[value] = number
    return [numbers[value] for value in values]


def batch_sizes(kinds: Sequence[Kind], samples: float, most: Sequence[float]) -> list[float]:
    """Samples for a replica of each kind, if so many are dealt out by speed and none gets more than its most."""
    full: set[int] = set()
    while True:
        left = samples - sum(most[i] * kinds[i].members for i in full)
        takers = sum(kind.pace * kind.members for i, kind in enumerate(kinds) if i not in full)
        level = left / (takers or 1.0)
        over = {i for i, kind in enumerate(kinds) if i not in full and level * kind.pace > most[i]}
        if not over:
            return [most[i] if i in full else level * kind.pace for i, kind in enumerate(kinds)]
        full |= over
