"""The nouns: what a prompt, a trajectory, a group and a version are.

Everything that crosses a process border or is written to the journal is a frozen msgspec struct, so that the types,
the wire format and the stored format are one thing. Ids are plain integers; people see them with a letter in front
(`t17`, `g3`, `r0`, `v5`), see `label` and `parse_label`.
"""

from __future__ import annotations

from typing import Annotated, Any, dataclass_transform

import msgspec
from msgspec import Meta

# What is read from elsewhere has to be within these; -1 stands for none where there may be none.
Natural = Annotated[int, Meta(ge=0, lt=1 << 53)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 53)]
PromptId = Natural
GroupId = Natural
TrajectoryId = Natural
ReplicaId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
RelayId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
HostId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
StoreId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Version = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]

# What msgspec raises for bytes that nobody of ours wrote. Nesting is bounded by Python's own limit, about 1,000 levels.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

RIGHT_ABOVE = 0.5  # an answer with a reward above this counts as right, where an accuracy is asked for

KINDS = {"p": "prompt", "g": "group", "t": "trajectory", "r": "replica", "h": "relay", "v": "version"}


@dataclass_transform(frozen_default=True)  # a subclass is frozen without saying so again
class Struct(msgspec.Struct, frozen=True, gc=False):
    """Base of every value that travels: immutable, and free of reference cycles (hence no garbage collection)."""


class Prompt(Struct):
    """A question to the policy. `tokens` is its length: control never sees the text."""

    id: PromptId
    tokens: Natural


class Row(Struct):
    """A prompt with everything that generating and judging its samples takes. It travels to the replica."""

    id: PromptId  # its place in the sequence of prompts
    tokens: tuple[Token, ...]  # rendered
    prompt: str | list[dict[str, Any]]  # as it was written: text, or messages
    columns: dict[str, Any] = {}  # `answer` and whatever else a reward may want


class Segment(Struct):
    """A run of tokens with one origin. `version` is None for tokens that the policy did not sample (prompt, tool)."""

    version: Version | None
    tokens: tuple[Token, ...]
    logprobs: tuple[float, ...] | None = None


class Trajectory(Struct):
    """One answer to one prompt, as the vault holds it. Loss mask and staleness are derived from the segments."""

    id: TrajectoryId
    group: GroupId
    prompt: PromptId
    segments: tuple[Segment, ...]
    finish: str = ""
    reward: float | None = None

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments if s.version is not None)

    @property
    def oldest_version(self) -> Version | None:
        return min((s.version for s in self.segments if s.version is not None), default=None)


class Group(Struct):
    """The samples of one prompt that are trained together."""

    id: GroupId
    prompt: PromptId
    trajectories: tuple[TrajectoryId, ...]


def label(kind: str, number: int) -> str:
    """`label("trajectory", 17) == "t17"`."""
    return f"{next(letter for letter, name in KINDS.items() if name == kind)}{number}"


def parse_label(text: str) -> tuple[str, int]:
    """The inverse of `label`, for what users type."""
    kind, digits = KINDS.get(text[:1]), text[1:]
    if kind is None or not digits.isdecimal():
        wanted = ", ".join(f"{letter}N for a {name}" for letter, name in KINDS.items())
        raise ValueError(f"'{text}' is not an id; write {wanted} (for example t17)")
    return kind, int(digits)
