"""The schedules: what makes each of them different, as data that the one plane reads.

kind        generation                              trainer takes         work in flight at an update
sync        rounds, on the newest weights           whole rounds          none
one_step    rounds, one version behind              whole rounds          none
stream      rounds, `steps_ahead` versions behind   mini-batches          none
partial     continuous, all replicas pull at once   mini-batches          goes on under the new weights
trajectory  continuous, each replica on its own     mini-batches          keeps its version
adaptive    continuous, each replica on its own     mini-batches          keeps its version, or goes on under the new
                                                                          weights where that is cheaper
"""

from __future__ import annotations

import msgspec

from tailrace.config.tree import Config, Schedule


class Traits(msgspec.Struct, frozen=True):
    rounds: bool  # the fleet generates one step's groups at a time, behind a barrier
    behind: int  # how many versions the weights of a round may lag behind the round's own step
    streams: bool  # the trainer may begin a step before all of its groups are there
    interrupts: bool  # replicas pull as soon as a version is everywhere, in the middle of their work
    chooses: bool = False  # each replica decides by cost what to do about a newer version (`updates.py`)


def traits(config: Config) -> Traits:
    schedule = config.schedule
    streams = (
        not config.colocated
    )  # on shared GPUs training stops generation: better once a step than once a mini-batch
    match schedule.kind:
        case "sync":
            return Traits(rounds=True, behind=0, streams=False, interrupts=False)
        case "one_step":
            return Traits(rounds=True, behind=1, streams=False, interrupts=False)
        case "stream":
            return Traits(rounds=True, behind=_behind(schedule), streams=streams, interrupts=False)
        case "partial":
            return Traits(rounds=False, behind=0, streams=streams, interrupts=True)
        case "trajectory" | "adaptive":
            return Traits(rounds=False, behind=0, streams=streams, interrupts=False, chooses=True)


def _behind(schedule: Schedule) -> int:
    """Streaming overlaps best one version behind; `steps_ahead = 0` makes it wait for its own update (on-policy)."""
    return min(1, schedule.max_staleness) if schedule.steps_ahead is None else int(schedule.steps_ahead)
