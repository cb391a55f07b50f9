"""The nouns: what a prompt, a trajectory, a group and a version are.

Everything that crosses a process border or is written to the journal is a frozen msgspec struct, so that the types,
the wire format and the stored format are one thing. Ids are plain integers; people see them with a letter in front
(`t17`, `g3`, `r0`, `v5`), see `label` and `parse_label`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, dataclass_transform

import msgspec
from msgspec import Meta

if TYPE_CHECKING:  # imported where it is used: a command line that needs no tokens starts without it
    import numpy as np
    from numpy.typing import NDArray

# What is read from elsewhere has to be within these; -1 stands for none where there may be none.
Natural = Annotated[int, Meta(ge=0, lt=1 << 53)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 53)]
PromptId = Natural
RowId = Annotated[int, Meta(ge=-1, lt=1 << 53)]
GroupId = Natural
TrajectoryId = Natural
ReplicaId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
RelayId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
HostId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
StoreId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Version = Annotated[int, Meta(ge=-1, lt=1 << 31)]
TOKEN_BYTES = 4  # of a token id (int32), and of a log-prob (float32); both little-endian

# What msgspec raises for bytes that nobody of ours wrote. Nesting is bounded by Python's own limit, about 1,000 levels.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# Prompts, groups and samples of evaluations are numbered from here on: they are no index of the training sequence, and
# have random numbers of their own.
EVALUATION = 1 << 40

RIGHT_ABOVE = 0.5  # an answer with a reward above this counts as right, where an accuracy is asked for

KINDS = {
    "p": "prompt",
    "g": "group",
    "t": "trajectory",
    "r": "replica",
    "h": "relay",
    "s": "store",
    "v": "version",
}


@dataclass_transform(frozen_default=True)  # a subclass is frozen without saying so again
class Struct(msgspec.Struct, frozen=True, gc=False):
    """Base of every value that travels: immutable, and free of reference cycles (hence no garbage collection)."""


class Card(Struct):
    """A GPU of a machine, and which CPUs are near it."""

    name: str
    memory: int  # bytes
    capability: tuple[int, int] = (0, 0)
    node: int = -1  # NUMA; -1: not known, or there is only one
    cpus: str = ""  # of that node, as Linux writes them ("0-31,64-95"); empty: not known

    @property
    def age(self) -> str:
        return f"compute capability {'.'.join(map(str, self.capability))}"


class CardShare(Struct):
    """What a process has of its machine: cards by number, its share of their memory, the CPUs near them."""

    cards: tuple[int, ...] = ()  # none: it computes on the CPU, or not at all
    memory: float = 0.0
    cpus: str = ""


class Prompt(Struct):
    """A question to the policy. `tokens` is its length: control never sees the text. `row` of the data: the same at
    every visit; -1: it will not come again."""

    id: PromptId
    tokens: Natural
    row: RowId = -1


class Row(Struct):
    """A prompt with everything that generating and judging its samples takes. It travels to the replica."""

    id: Annotated[int, Meta(ge=-(1 << 53), lt=1 << 53)]  # its index in the sequence of prompts; below 0: held out
    tokens: bytes  # rendered: token ids as little-endian int32
    prompt: str | list[dict[str, Any]]  # as it was written: text, or messages
    columns: dict[str, Any] = {}  # `answer` and whatever else a reward may want

    @property
    def ids(self) -> NDArray[np.int32]:
        """The token ids, without a copy."""
        return token_ids(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Segment(Struct):
    """A run of tokens with one origin. `version` is None for tokens that the policy did not sample (prompt, tool).

    Tokens and log-probs are buffers from the engine to the packer: little-endian int32 and float32. `len` is in tokens.
    """

    version: Version | None
    tokens: bytes
    logprobs: bytes | None = None

    @classmethod
    def of(cls, version: Version | None, ids: Sequence[int] | NDArray[Any], logprobs: Any = None) -> Segment:
        """From any sequences of numbers."""
        import numpy as np

        return cls(version, id_bytes(ids), None if logprobs is None else np.asarray(logprobs, "<f4").tobytes())

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def ids(self) -> NDArray[np.int32]:
        """The token ids, without a copy."""
        return token_ids(self.tokens)

    @property
    def logprob_values(self) -> NDArray[np.float32]:
        """The log-probs, without a copy; none where nothing was sampled."""
        import numpy as np

        return np.frombuffer(self.logprobs or b"", "<f4")


class Trajectory(Struct):
    """One answer to one prompt, as its sample store holds it. Loss mask and staleness are derived from the segments."""

    id: TrajectoryId
    group: GroupId
    prompt: PromptId
    segments: tuple[Segment, ...]
    finish: str = ""
    reward: float | None = None

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s) for s in self.segments if s.version is not None)


def token_ids(tokens: bytes | bytearray | memoryview) -> NDArray[np.int32]:
    """The token ids of a buffer, without a copy."""
    import numpy as np

    return np.frombuffer(tokens, "<i4")


def id_bytes(ids: Sequence[int] | NDArray[Any]) -> bytes:
    """Token ids as a buffer."""
    import numpy as np

    return np.asarray(ids, "<i4").tobytes()


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
