"""One trajectory while it is being made: the policy's turns, what the environment inserted, and what is not stored yet.

    policy's turn -> judged -> (observation, next turn)* -> scored

An episode can be taken up from any prefix: everything it knows follows from the row and the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from tailrace.engines.base import Job
from tailrace.envs.base import Turn
from tailrace.protocol import Request, TrajectoryMeta
from tailrace.types import TOKEN_BYTES, Row, Segment, Version, token_ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Decode = Callable[[Sequence[int]], str]


class TokenRun(NamedTuple):
    """Tokens of one origin; positions are in bytes."""

    version: Version | None
    start: int
    end: int


class Episode:
    """All tokens are in one growing buffer; the origins of those after the prompt are runs in it."""

    def __init__(
        self,
        request: Request,
        row: Row,
        prefix: Sequence[Segment],
        version: Version,
        temperature: float | None = None,
    ) -> None:
        self.request = request
        self._temperature = temperature  # of an evaluation that has one of its own
        self.row = row
        self.tokens = bytearray(row.tokens)  # int32
        self._logprobs = bytearray()  # float32, of the sampled tokens that `take_growth` has not handed out
        self._runs: list[tuple[Version | None, int]] = []  # the origin of each, and where it begins
        for segment in prefix:
            self._begin_run(segment.version)
            self.tokens += segment.tokens
        self._stored = len(self.tokens)
        self._assigned_under = version
        self.turn = sum(segment.version is None for segment in prefix)  # observations before the present one
        self.finish = ""

    @property
    def key(self) -> tuple[int, int]:
        """Names this assignment: an answer to an earlier one is not ours."""
        return self.request.trajectory, self.request.attempt

    @property
    def completion_tokens(self) -> int:
        return (len(self.tokens) - len(self.row.tokens)) // TOKEN_BYTES

    @property
    def unstored_tokens(self) -> int:
        return (len(self.tokens) - self._stored) // TOKEN_BYTES

    def job(self, max_completion_tokens: int) -> Job:
        """The next turn, for an engine, which copies the tokens when it is submitted."""
        request = self.request
        room = max_completion_tokens - self.completion_tokens
        return Job(
            request.trajectory,
            request.group,
            self.tokens,
            self.row.length,
            room,
            request.failures,
            self._temperature,
        )

    def sampled(self, version: Version, tokens: bytes, logprobs: bytes) -> None:
        if not tokens:
            return
        if not self._runs or self._runs[-1][0] != version:
            self._begin_run(version)
        self.tokens += tokens
        self._logprobs += logprobs

    def observed(self, tokens: bytes) -> None:
        """The environment has put these in; the policy did not sample them."""
        self.turn += 1
        self._begin_run(None)
        self.tokens += tokens

    def _begin_run(self, version: Version | None) -> None:
        self._runs.append((version, len(self.tokens)))

    def _token_runs(self) -> list[TokenRun]:
        """All runs after the prompt, in order."""
        bounds = [start for _, start in self._runs] + [len(self.tokens)]
        return [TokenRun(*run, end) for run, end in zip(self._runs, bounds[1:], strict=True)]

    def take_growth(self) -> tuple[Segment, ...]:
        """What has been added since the last call, in runs of one origin."""
        growth = tuple(self._fresh_segments())
        self._stored = len(self.tokens)
        self._logprobs.clear()
        return growth

    def _fresh_segments(self) -> Iterator[Segment]:
        taken = 0
        for version, start, end in self._token_runs():
            tokens = bytes(self.tokens[max(start, self._stored) : end])
            if tokens and version is None:
                yield Segment(None, tokens)
            elif tokens:
                yield Segment(version, tokens, bytes(self._logprobs[taken : taken + len(tokens)]))
                taken += len(tokens)

    def last_turn(self) -> NDArray[np.int32]:
        """The policy's tokens since the last observation."""
        start = next((run.end for run in reversed(self._token_runs()) if run.version is None), len(self.row.tokens))
        return self._ids(start, len(self.tokens))

    def transcript(self, said: Decode, observed: Decode) -> tuple[Turn, ...]:
        """The turns so far as text, for whoever judges them: what the policy `said`, and what it `observed`."""
        turns: list[Turn] = []
        for inserted, run in groupby(self._token_runs(), key=lambda run: run.version is None):
            runs = list(run)
            tokens = self._ids(runs[0].start, runs[-1].end).tolist()
            turns.append(Turn("environment", observed(tokens)) if inserted else Turn("policy", said(tokens)))
        return tuple(turns)

    def _ids(self, start: int, end: int) -> NDArray[np.int32]:
        """A copy: a view would keep the buffer from growing."""
        return token_ids(self.tokens[start:end])

    def meta(self, reward: float | None = None) -> TrajectoryMeta:
        """What control gets to know. A sample without a token counts from the version that it would have begun with."""
        versions = [version for version, _ in self._runs if version is not None]
        oldest, newest = min(versions, default=self._assigned_under), max(versions, default=self._assigned_under)
        trajectory, attempt = self.key
        return TrajectoryMeta(trajectory, attempt, self.completion_tokens, oldest, newest, self.finish, reward)
