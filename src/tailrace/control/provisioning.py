"""With which staleness bound, publish interval and rollout rate the trainer never waits (ECHO-2's provisioning rule).

Weights are published every `publish_every` steps (kappa) and are everywhere `broadcast_s` later. A group that starts
under version x may be trained up to step x + S (S is `schedule.max_staleness`), and takes `generate_s` to finish. So
the groups of one published version that can still be used are those that start within

    window = S * step_s - broadcast_s - generate_s

after it has arrived, and these have to last for kappa steps:

    rate >= work * max(1 / step_s, kappa / window),    window > 0

A pure function of six figures: the planner and `tailrace doctor` take them from the cost model
(`sim/provisioning.py`), a running check could take them from what control measures (`Training.pace_s`,
`Relays.publish_s`). ECHO-2 has `generate_s` in the second condition alone; `benchmarks/provisioning.py` holds both
forms against the simulator.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple


class Provisioning(NamedTuple):
    """What the rule is about. `work` and `rate` in the same unit: samples or tokens, of a step and per second."""

    work: float
    rate: float  # of all replicas
    step_s: float  # of the trainer, if it never waits
    broadcast_s: float  # from the end of a step until every replica could have its version
    generate_s: float  # of a typical group, until its last sample is done
    staleness: int
    publish_every: int = 1

    @property
    def window_s(self) -> float:
        """In which a published version starts work that is trained in time."""
        return self.staleness * self.step_s - self.broadcast_s - self.generate_s

    @property
    def needed(self) -> float:
        """The least rate with which the trainer never waits; infinite: no rate is enough."""
        if self.window_s <= 0.0:
            return inf
        return self.work * max(1.0 / self.step_s, self.publish_every / self.window_s)

    @property
    def holds(self) -> bool:
        return self.rate >= self.needed

    @property
    def keeps_up(self) -> bool:
        """Replicas make as much as the trainer takes; without that no staleness bound is enough."""
        return self.rate * self.step_s >= self.work

    @property
    def least_staleness(self) -> int:
        """The least bound with which this rate is enough, if it keeps up."""
        window = self.publish_every * self.work / self.rate
        return ceil((window + self.broadcast_s + self.generate_s) / self.step_s - 1e-9)

    @property
    def most_publish_every(self) -> int:
        """The largest publish interval with which this rate is enough; 0: there is none."""
        return int(max(0.0, self.window_s * self.rate / self.work) + 1e-9) if self.keeps_up else 0
