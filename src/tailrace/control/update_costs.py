"""What a replica with work in hand does when there is a newer version for it.

    take_along   it pulls now; what it has goes on under the new weights, its KV computed again
    drain        it gets nothing more, and pulls once that is cheaper, or when it has run out
    stay         it goes on as it is: new samples start under the weights that it has

`choose` is a pure function of a few numbers, and every cost is in seconds of the replica's decoding at full batch:

- taking along costs the prefill of the KV that is in use;
- draining costs what a shrinking batch does not decode. Where work is scarce, what is not started here is started
  elsewhere, so only the difference counts: what it would add here less what it adds there. The batch is followed to its
  end by the expected lengths of its samples, and the cheapest moment to take the rest along is the cost of draining;
- staying costs staleness: each version that a new sample lags behind has a price (`price_of_lag`), and so has what will
  be lost where late groups are dropped. With every version that a replica lets pass, the next is worth more to it;
- taking along and staying keep the batch full: samples end later there than in one that runs out. Each version that
  they end later is priced alike, and so is how much likelier they are to come too late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, inf
from typing import NamedTuple

from tailrace.control.speed import DecodeCosts
from tailrace.protocol import UpdateChoice

CHEAPEST, DEAREST = 0.05, 0.13  # of a token, for each version that its first one lags behind more than it has to
WORTH = 0.0165  # the same of the time in which the trainer waits


def price_of_lag(waits: float) -> float:
    """`waits`: share of the time in which the trainer has nothing to train on. More tokens are of use then only: where
    it seldom waits, fresher ones are worth more."""
    return min(DEAREST, max(CHEAPEST, WORTH / waits)) if waits > 0 else DEAREST


class InFlight(NamedTuple):
    """One sample that a replica generates."""

    context: float  # tokens of KV
    left: float  # tokens that it is expected to get yet
    due_s: float = inf  # its group is dropped if it takes longer
    at_stake: float = 0.0  # its part of the tokens that are lost then


class Situation(NamedTuple):
    costs: DecodeCosts
    samples: list[InFlight]
    kv: float  # tokens in use
    batch: float  # samples that it would generate if it were fed; 0: there is nothing to start
    elsewhere: float  # tokens per second that one more sample adds where else it would be started
    may_mix: bool
    may_stay: bool
    late_share: Sequence[float] = ()  # of what starts 1, 2, ... versions behind, until it pulls: what comes too late
    pace_s: float = 0.0  # between two versions
    lag_price: float = CHEAPEST
    away: int = 0  # further samples that have it generate on when their tool answers


class ChoiceCosts(NamedTuple):
    """None: it cannot be chosen."""

    recompute_s: float | None
    drain_s: float
    stay_s: float | None


def choose(now: Situation) -> tuple[UpdateChoice, ChoiceCosts]:
    """The cheapest; where costs are equal, what keeps versions apart."""
    late_s = _late_s(now)
    recompute = now.costs.prefill_token * now.kv + late_s if now.may_mix else None
    costs = ChoiceCosts(recompute, drain_s(now), _stay_s(now) + late_s if now.may_stay else None)
    options: list[tuple[float, UpdateChoice]] = [(costs.drain_s, "drain")]
    if costs.stay_s is not None:
        options.append((costs.stay_s, "stay"))
    if recompute is not None:
        options.append((recompute, "take_along"))
    return min(options, key=lambda option: option[0])[1], costs


def _stay_s(now: Situation) -> float:
    """Since its last pull it has lagged 1, 2, ... versions behind, each for about the pace of versions."""
    return now.pace_s * sum(now.lag_price * behind + late for behind, late in enumerate(now.late_share, 1))


def _late_s(now: Situation) -> float:
    """What comes later in a batch that is filled up than in one that runs out: staler, or too late."""
    batch = _full_batch(now)
    step_s = now.costs.step_s(batch, batch * _mean_context(now))
    lost = soon_s = 0.0
    for stretch in _running_out(now):
        soon_s += stretch.seconds
        sample = stretch.until
        late_s = max(soon_s, sample.left * step_s)
        staler = now.lag_price * (late_s - soon_s) / now.pace_s if now.pace_s else 0.0
        lost += sample.at_stake * (staler + _dropped(sample, late_s) - _dropped(sample, soon_s))
    return lost / _full_rate(now)


def _dropped(sample: InFlight, ends_s: float) -> float:
    """How likely it is to end too late, if it is expected to end then: what is left of a sample is about as uncertain
    as it is long. One that has ended is not late: `ends_s` is below 0 where the KV that a replica last reported is less
    than its samples have by now."""
    return exp(-max(0.0, sample.due_s) / ends_s) if ends_s > 0.0 else 0.0


def drain_s(now: Situation, enough: float = inf) -> float:
    """Of the cheapest moment from the first sample's end on. `enough`: more than this need not be known exactly. Nobody
    knows for how long it would wait for what is away: it is not worth it where that can be taken along."""
    if not now.batch:
        return 0.0
    if now.away and now.may_mix:
        return inf
    full = _full_rate(now)
    lost, best = 0.0, inf
    for stretch in _running_out(now):
        lost += stretch.seconds * _idle_share(now, stretch.running, stretch.kv, full)
        if now.may_mix or stretch.running == 1:
            best = min(best, lost + now.costs.prefill_token * max(0.0, stretch.kv_left))
        if lost >= best or lost > enough:
            break
    return best


class Stretch(NamedTuple):
    """Of a batch that gets nothing more: up to the end of its next sample."""

    until: InFlight
    running: int  # samples, this one included
    seconds: float
    kv: float  # in the middle
    kv_left: float  # once the sample has ended


def _running_out(now: Situation) -> Iterator[Stretch]:
    kv, elapsed = now.kv, 0.0
    samples = sorted(now.samples, key=lambda one: one.left)
    for index, sample in enumerate(samples):
        running = len(samples) - index
        steps = max(0.0, sample.left - elapsed)
        middle = kv + running * steps / 2
        kv = middle + running * steps / 2 - sample.context - sample.left
        elapsed = max(elapsed, sample.left)
        yield Stretch(sample, running, steps * now.costs.step_s(running, middle), middle, kv)


def _full_rate(now: Situation) -> float:
    batch = _full_batch(now)
    return now.costs.rate(batch, batch * _mean_context(now))


def _full_batch(now: Situation) -> float:
    return max(now.batch, float(len(now.samples)), 1.0)


def _mean_context(now: Situation) -> float:
    return now.kv / len(now.samples) if now.samples else 0.0


def _idle_share(now: Situation, running: int, kv: float, full: float) -> float:
    """How much less a batch of this size adds than a full one would, samples started elsewhere counted."""
    missing = max(0.0, now.batch - running)
    gap = full - now.costs.rate(running, kv) - now.elsewhere * missing
    return max(0.0, gap) / full
