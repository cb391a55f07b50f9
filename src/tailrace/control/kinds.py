"""Replicas of different speed: which of them are alike, and how much of the work each should have.

Every replica reports what its engine does and how long that takes; from that follows how many tokens a second it would
decode in a batch of usual size (`rates`). Those that are about as fast, and have about as much KV, are one kind. In a
fleet of one kind everybody gets the same. Where there are several, work is dealt out by speed, and what one kind has no
room for goes to the others (`batch_sizes`), so that a sample takes about as long wherever it is generated.

Pure functions over a few numbers per replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

ALIKE = 1.25  # times as fast as the slowest of a kind is the fastest of it, at most; the same with KV


class Kind(msgspec.Struct):
    pace: float = 1.0  # tokens per second of a replica, against the mean of the fleet
    tail_s: float = 0.0  # its decode step with a lone sample; 0: not known yet
    kv_capacity: int = 0  # the smallest
    members: int = 0  # that are asked to generate


class ReplicaFigures(NamedTuple):
    """What is known of a replica. 0: nothing yet."""

    rate: float  # tokens per second
    kv_capacity: int
    tail_s: float = 0.0
    works: bool = True  # it is asked to generate


def sort_out(replicas: Sequence[ReplicaFigures]) -> tuple[list[Kind], list[int]]:
    """The kinds that there are, and of which each replica is. Whose rate is not known counts as the mean."""
    known = [one.rate for one in replicas if one.rate > 0.0]
    mean = sum(known) / len(known) if known else 1.0
    rates = [one.rate or mean for one in replicas]
    working = [rate for one, rate in zip(replicas, rates, strict=True) if one.works] or rates
    classes = list(zip(_classes(rates), _classes([float(one.kv_capacity) for one in replicas]), strict=True))
    keys = sorted(set(classes))
    numbers = [keys.index(key) for key in classes]
    alike = len({by_rate for by_rate, _ in classes}) == 1
    kinds = [Kind() for _ in keys] or [Kind()]
    for number, kind in enumerate(kinds if replicas else ()):
        own = [i for i, other in enumerate(numbers) if other == number]
        kind.pace = 1.0 if alike else sum(rates[i] for i in own) / len(own) * len(working) / sum(working)
        kind.tail_s = sum(replicas[i].tail_s for i in own) / len(own)
        kind.kv_capacity = min(replicas[i].kv_capacity for i in own)
        kind.members = sum(replicas[i].works for i in own)
    return kinds, numbers


def _classes(values: Sequence[float]) -> list[int]:
    """The number of each value's class: from the smallest on, as far as values are alike."""
    numbers: dict[float, int] = {}
    first, number = 0.0, -1
    for value in sorted(set(values)):
        if number < 0 or value > ALIKE * first:
            first, number = value, number + 1
        numbers[value] = number
    return [numbers[value] for value in values]


def shares(total: int, paces: Sequence[float]) -> list[int]:
    """So many things, dealt out by speed; what cannot be divided goes to the first of those who lack most."""
    whole = sum(paces)
    exact = [total * pace / whole for pace in paces]
    dealt = [int(share) for share in exact]
    lacking = sorted(range(len(paces)), key=lambda i: (dealt[i] - exact[i], i))
    for i in lacking[: total - sum(dealt)]:
        dealt[i] += 1
    return dealt


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
