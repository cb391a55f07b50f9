"""With which staleness bound, publish interval and rollout rate the trainer never waits (ECHO-2's provisioning rule).

Weights are published every `publish_every` steps (kappa) and are everywhere `broadcast_s` later. A group that starts
under version x may be trained up to step x + S (S is `schedule.max_staleness`), and takes `generate_s` to finish. So
the groups of one published version that can still be used are those that start within

    window = S * step_s - broadcast_s - generate_s

after it has arrived, and these have to last for kappa steps. Step x + S + 1 is the first that cannot use version x any
more: by then the next published version, which is kappa steps newer, must have made what the step begins with:

    first  = (S + 1 - kappa) * step_s - broadcast_s - generate_s
    rate  >= work * max(1 / step_s,  kappa / window,  1 / (picks * first))

and a version has to arrive before the next one is published, or versions queue up: `broadcast_s <= kappa * step_s`.

A pure function of a few figures: the planner and `tailrace doctor` take them from the cost model
(`sim/provisioning.py`), a running controller from what it sees (`runtime/provisioning_watch.py`). ECHO-2 has no third
term, and `generate_s` only as a condition; `benchmarks/provisioning.py` holds both forms against the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf
from typing import NamedTuple

ROUNDING = 1e-9


class Provisioning(NamedTuple):
    """What the rule is about. `work` and `rate` in the same unit: samples or tokens, of a step and per second."""

    work: float
    rate: float  # of all replicas
    step_s: float  # of the trainer, if it never waits
    broadcast_s: float  # from the end of a step until every replica could have its version
    generate_s: float  # of a typical group, until its last sample is done
    staleness: int
    publish_every: int = 1
    picks: int = 1  # of a step: mini-batches that the trainer takes one by one

    @property
    def arrives_s(self) -> float:
        """From the end of a step until the first groups of its version are done."""
        return self.broadcast_s + self.generate_s

    @property
    def window_s(self) -> float:
        """In which a published version starts work that is trained in time."""
        return self.staleness * self.step_s - self.arrives_s

    @property
    def first_s(self) -> float:
        """That a version has to make what the first step begins with that depends on it."""
        return (self.staleness + 1 - self.publish_every) * self.step_s - self.arrives_s

    @property
    def keeps_up(self) -> bool:
        """Replicas make as much as the trainer takes; without that no staleness bound is enough."""
        return self.rate * self.step_s >= self.work

    @property
    def link_keeps_up(self) -> bool:
        """A version arrives before the next one is published."""
        return self.broadcast_s <= self.publish_every * self.step_s

    @property
    def needed(self) -> float:
        """The least rate with which the trainer never waits; infinite: no rate is enough."""
        if self.window_s <= 0.0 or self.first_s <= 0.0 or not self.link_keeps_up:
            return inf
        per_window, per_first = self.publish_every / self.window_s, 1.0 / (self.picks * self.first_s)
        return self.work * max(1.0 / self.step_s, per_window, per_first)

    @property
    def holds(self) -> bool:
        return self.rate >= self.needed

    @property
    def least_publish_every(self) -> int:
        """The least publish interval that the link keeps up with."""
        return max(1, ceil(self.broadcast_s / self.step_s - ROUNDING))

    @property
    def least_staleness(self) -> int:
        """The least bound with which this rate is enough, if it and the link keep up."""
        step_of_work = self.work / self.rate / self.step_s
        arrives = self.arrives_s / self.step_s
        by_window = ceil(self.publish_every * step_of_work + arrives - ROUNDING)
        return max(by_window, ceil(step_of_work / self.picks + arrives - ROUNDING) + self.publish_every - 1)


def advice_on(rule: Provisioning, unit: str = "tokens") -> Iterator[str]:
    """What to change where the trainer would have to wait; nothing: it would not."""
    if not rule.keeps_up:
        yield (
            f"replicas generate {rule.rate:,.0f} {unit}/s and the trainer could take {rule.work / rule.step_s:,.0f}, "
            "so it waits; give it fewer GPUs, or add replicas"
        )
    elif not rule.link_keeps_up:
        yield (
            f"a version takes {rule.broadcast_s:,.0f} s until it is everywhere and a step {rule.step_s:,.0f} s, so "
            f"versions queue up on the link; write schedule.publish_every = {rule.least_publish_every}"
        )
    elif not rule.holds:
        every = "every step" if rule.publish_every == 1 else f"every {rule.publish_every} steps"
        later = rule.broadcast_s + rule.generate_s
        yield (
            f"weights are published {every} and their first groups are done {later:,.0f} s later, too late for "
            f"schedule.max_staleness = {rule.staleness} and steps of {rule.step_s:,.0f} s, so the trainer "
            f"waits; write schedule.max_staleness = {rule.least_staleness}"
        )
