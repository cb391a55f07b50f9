"""What other machines have to bring before a run can go on: ranks of its trainer, or a replica.

A wait has a sentence with the command that ends it. One that is longer than `local.wait_s` ends the run, which can be
resumed.
"""

from __future__ import annotations

from pathlib import Path

from tailrace.config.tree import Config
from tailrace.wording import counted


class Provision:
    """`join_key`: the file with which other machines join."""

    def __init__(self, config: Config, endpoint: str, join_key: Path) -> None:
        self._own_replicas = config.local.replicas
        self._wait_s = config.local.wait_s
        self._join = f"tailrace worker --join {endpoint.removeprefix('tcp://')} --key {join_key}"
        self._since: dict[str, float] = {}  # when each wait began

    def for_ranks(self, missing: int) -> str:
        more = counted(missing, "more rank")
        return f"the trainer waits for {more}: {self._join} --ranks {missing}"

    def for_replicas(self) -> str:
        return f"the run waits for a replica: {self._join} --replicas 1"

    def look(self, now: float, missing_ranks: int, replicas: int) -> list[str]:
        """The sentences of the waits that have begun since the last look. `missing_ranks`: those without which the
        trainer cannot start; `replicas`: those of other machines."""
        waits = [self.for_ranks(missing_ranks)] if missing_ranks else []
        waits += [] if self._own_replicas or replicas else [self.for_replicas()]
        new = [sentence for sentence in waits if sentence not in self._since]
        self._since = {sentence: self._since.get(sentence, now) for sentence in waits}
        return new

    def overdue(self, now: float) -> str:
        """The sentence of a wait that has been too long."""
        late = [sentence for sentence, since in self._since.items() if now - since > self._wait_s]
        return f"nobody came within {self._wait_s:g} s (local.wait_s), and {late[0]}" if late else ""
