"""The contract of a task: prompts by index, and an answer to every turn of the policy.

A task has no state of its own. What follows a turn is a function of the row and the transcript so far, so an episode
can be taken up from any prefix, on any replica, after any crash. The controller reads rows; `respond` runs in
processes that can be killed (`judges.py`).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from tailrace.types import Row, Struct

__all__ = ["UNSCORED", "Answer", "Faulted", "Observed", "Row", "Scored", "Task", "Turn"]

UNSCORED = (
    "the tokens were used up before the task scored it; give the task a method score(row, transcript) for such an "
    "episode, or raise workload.max_completion_tokens"
)


class Turn(Struct):
    """One piece of a transcript after the prompt."""

    role: Literal["policy", "environment"]
    text: str


class Scored(Struct, tag=True):
    """The episode is over. `parts`: what the reward is made of, by name, for whoever reads the sample."""

    reward: float
    parts: dict[str, float] = msgspec.field(default_factory=dict)


class Observed(Struct, tag=True):
    """The policy gets this to read and has another turn."""

    text: str


class Faulted(Struct, tag=True):
    """The reward or the tool raised, hung or answered nonsense: an error, never a reward."""

    reason: str


Answer = Scored | Observed | Faulted


class Task(Protocol):
    """What a user writes, or a built-in task is."""

    def __len__(self) -> int:
        """How many different training rows there are."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """A training row: `prompt` (text or messages), `answer`, and free columns."""
        ...

    def held_out(self) -> list[dict[str, Any]]:
        """Rows that are never trained on."""
        ...

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored | Observed:
        """What follows the policy's last turn, with which the transcript ends. May raise or hang: it runs where that
        does no harm."""
        ...

    # And, where `respond` gives observations: score(row, transcript) -> Scored, of an episode that has no tokens for
    # another turn. Its transcript ends with the last observation, or with as much of it as fitted.
