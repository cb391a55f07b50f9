"""One trajectory while it is being made: the policy's turns, what the environment inserted, and what is not stored yet.

    policy's turn -> judged -> (observation, next turn)* -> scored

An episode can be taken up from any prefix: everything it knows follows from the row and the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from tailrace.engines.base import Job
from tailrace.envs.base import Turn
from tailrace.protocol import Request, TrajectoryMeta
from tailrace.types import Row, Segment, Version

Decode = Callable[[Sequence[int]], str]


class Episode:
    def __init__(self, request: Request, row: Row, prefix: Sequence[Segment], version: Version) -> None:
        self.request = request
        self.row = row
        self.tokens = [*row.tokens, *(token for segment in prefix for token in segment.tokens)]
        self._stored = list(prefix)
        self._fresh: list[Segment] = []  # not handed out by `take_growth` yet
        self._assigned_under = version
        self.turn = sum(segment.version is None for segment in prefix)  # observations before the present one
        self.unstored_tokens = 0
        self.finish = ""

    @property
    def key(self) -> tuple[int, int]:
        """Names this assignment: an answer to an earlier one is not ours."""
        return self.request.trajectory, self.request.epoch

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - len(self.row.tokens)

    def job(self, max_completion_tokens: int) -> Job:
        """The next turn, for an engine."""
        request = self.request
        room = max_completion_tokens - self.completion_tokens
        prompt = len(self.row.tokens)
        return Job(request.trajectory, request.group, tuple(self.tokens), prompt, room, request.failures)

    def sampled(self, version: Version, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        self._grow(Segment(version, tokens, logprobs))

    def observed(self, tokens: tuple[int, ...]) -> None:
        """The environment has put these in; the policy did not sample them."""
        self.turn += 1
        self._grow(Segment(None, tokens))

    def _grow(self, segment: Segment) -> None:
        self.tokens.extend(segment.tokens)
        self._fresh.append(segment)
        self.unstored_tokens += len(segment.tokens)

    def take_growth(self) -> tuple[Segment, ...]:
        """What has been added since the last call, in runs of one origin."""
        growth = tuple(merged(self._fresh))
        self._stored.extend(growth)
        self._fresh.clear()
        self.unstored_tokens = 0
        return growth

    def last_turn(self) -> list[int]:
        """The policy's tokens since the last observation."""
        tokens: list[int] = []
        for segment in (*reversed(self._fresh), *reversed(self._stored)):
            if segment.version is None:
                break
            tokens[:0] = segment.tokens
        return tokens

    def transcript(self, said: Decode, observed: Decode) -> tuple[Turn, ...]:
        """The turns so far as text, for whoever judges them: what the policy `said`, and what it `observed`."""
        turns: list[Turn] = []
        for inserted, run in groupby((*self._stored, *self._fresh), key=lambda segment: segment.version is None):
            tokens = tuple(token for one in run for token in one.tokens)
            turns.append(Turn("environment", observed(tokens)) if inserted else Turn("policy", said(tokens)))
        return tuple(turns)

    def meta(self, reward: float | None = None) -> TrajectoryMeta:
        """What control gets to know. A sample without a token counts from the version that it would have begun with."""
        versions = [one.version for one in (*self._stored, *self._fresh) if one.version is not None]
        oldest, newest = min(versions, default=self._assigned_under), max(versions, default=self._assigned_under)
        trajectory, epoch = self.key
        return TrajectoryMeta(trajectory, epoch, self.completion_tokens, oldest, newest, self.finish, reward)


def merged(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Neighbours of one origin as one segment."""
    for version, run in groupby(segments, key=lambda segment: segment.version):
        pieces = list(run)
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        logprobs = None if version is None else tuple(value for piece in pieces for value in piece.logprobs or ())
        yield Segment(version, tokens, logprobs)
