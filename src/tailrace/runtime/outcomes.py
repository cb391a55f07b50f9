"""What becomes of samples, as run.db's table of trajectories has to know it; and when nothing succeeds any more.

The controller tells it of every event before control hears it.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.config.tree import Config
from tailrace.control.state import State
from tailrace.protocol import Event, Finished, SampleFailed, Trained
from tailrace.runtime.components import Components
from tailrace.store.trajectories import TrajectoryTable
from tailrace.types import TrajectoryId


class Outcomes:
    def __init__(
        self, config: Config, trajectories: TrajectoryTable, components: Components, fail: Callable[[str], None]
    ) -> None:
        """`fail`: ends the run with a sentence."""
        self._most_failures = 2 * config.workload.group_size * config.groups.max_failures
        self._trajectories = trajectories
        self._components = components
        self._fail = fail
        self._failures = 0  # samples in a row that could not be judged

    def note(self, state: State, event: Event) -> None:
        match event:
            case Finished(_, meta, parts):
                self._failures = 0
                if self._trajectories.finish(meta):
                    self._trajectories.explain(meta.id, parts)
            case SampleFailed(replica, trajectory, attempt, reason, meta):
                ours = self._components.is_ours("replica", replica) and not _is_strangers(state, trajectory)
                if self._trajectories.fail(trajectory, attempt, reason, meta) and ours:
                    self._count_failure(reason)
            case Trained(incarnation, step, mini_batch) if state.training.awaits(incarnation, step, mini_batch):
                self._trajectories.trained([id for group in state.training.picked for id in group.trajectories], step)
            case _:
                pass

    def _count_failure(self, reason: str) -> None:
        """One sample may fail; when none succeeds any more, going on would only burn the prompts. What fails on another
        machine may be that machine's fault: control puts it in quarantine."""
        self._failures += 1
        if self._failures >= self._most_failures:
            self._fail(f"{self._failures} samples in a row could not be judged; the last one because {reason}")


def _is_strangers(state: State, trajectory: TrajectoryId) -> bool:
    sample = state.ledger.samples.get(trajectory)
    return sample is not None and bool(sample.check)
