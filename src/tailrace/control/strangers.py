"""The strangers as control knows them: workers with keys of their own, who are not believed.

    worker:  admitted -> excluded     its key was revoked, it sent what it must not, or a check of its work failed

Which of its samples are scored again follows from a number that no stranger knows, so that none can tell beforehand.
Owned by the plane; `checks.py` decides what is done about them.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from tailrace.control.fleet import Fleet
from tailrace.control.ledger import Sample
from tailrace.protocol import Check
from tailrace.types import HostId, TrajectoryId


class Worker(msgspec.Struct):
    """A stranger, by the name of its key."""

    name: str
    salt: int = 0
    hosts: list[HostId] = []  # the machines that came with its key
    handed_in: int = 0  # samples
    scored: int = 0  # of these, again
    passed: int = 0  # of these, without a difference
    excluded: str = ""  # why

    def check(self, id: TrajectoryId, share: float) -> Check:
        """What is looked at, of a sample that it hands in."""
        digest = blake2b(f"{self.salt} {id}".encode(), digest_size=8).digest()
        return "draws" if int.from_bytes(digest) < share * 2**64 else "turn"


class Workers(msgspec.Struct):
    workers: dict[str, Worker] = {}

    @property
    def admitted(self) -> bool:
        """Somebody is."""
        return any(not worker.excluded for worker in self.workers.values())

    def welcome(self, name: str, salt: int, host: HostId) -> Worker:
        """The salt is that of its first machine: another one must not change what is looked at."""
        worker = self.workers.setdefault(name, Worker(name, salt))
        worker.hosts.append(host)
        return worker

    def passed(self, fleet: Fleet, sample: Sample) -> None:
        """A checker has found nothing wrong with it, and judged it."""
        stranger = fleet.replicas[sample.stranger]
        stranger.restarts = stranger.failures = 0
        self.workers[stranger.worker].passed += sample.check == "draws"
