"""What the fold of a journal (`fold.py`) remembers of each sample, replica and stranger while they are there."""

from __future__ import annotations

import msgspec

from tailrace.types import GroupId, HostId, PromptId, ReplicaId, TrajectoryId, Version

ASSIGNED = ("running", "scoring")  # states in which a replica has a sample


class SampleRecord(msgspec.Struct, gc=False):
    group: GroupId
    prompt: PromptId
    attempt: int
    replica: ReplicaId
    prompt_tokens: int
    failures: int = 0  # of earlier attempts
    state: str = "running"  # running, scoring, parked, handed_in, lost, failed, cancelled, finished, trained
    turn: int = 0
    final: bool = False  # of one that is scoring: the judge's answer ends it
    tokens: int = 0
    oldest: Version = 0
    reward: float | None = None
    truncated: bool = False


class ReplicaRecord(msgspec.Struct):
    incarnation: int = 0
    host: HostId = -1
    version: Version = -1
    assigned: dict[TrajectoryId, None] = {}  # all that it has
    scoring: int = 0  # of these: a judge has them
    evaluating: dict[TrajectoryId, int] = {}  # samples of an evaluation that it has, and their attempts
    judging: int = 0  # of these again: its answer ends the sample; the others wait for their environment

    @property
    def generating(self) -> int:
        """Waiting ones included."""
        return len(self.assigned) - self.scoring + len(self.evaluating)


class StrangerRecord(msgspec.Struct):
    """A worker with a key of its own."""

    replicas: list[ReplicaId] = []
    handed_in: int = 0  # samples
    scored: int = 0  # of these, again
    excluded: str = ""  # why

    def __str__(self) -> str:
        share = f"{self.handed_in:,} samples handed in, {self.scored:,} scored again"
        return f"{share}; quarantined: {self.excluded}" if self.excluded else share
