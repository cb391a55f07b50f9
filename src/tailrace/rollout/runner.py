"""Plays episodes on one engine: submits turns, has them judged, goes on or ends. No process, no wire.

The rollout worker and the evaluation both drive a `Runner`; it owns the episodes between `add` and their `Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from tailrace.engines.base import Engine, Sampled
from tailrace.envs.base import UNSCORED, Answer, Faulted, Observed, Scored, Turn
from tailrace.rollout.episode import Decode, Episode
from tailrace.types import Row, TrajectoryId, Version

Key = tuple[int, int]


class Judge(Protocol):
    """Whoever answers to the policy's turns, in its own time. A transcript that ends with the environment's is that of
    an episode without tokens for another turn: it can only be scored."""

    def ask(self, key: Key, row: Row, transcript: tuple[Turn, ...]) -> None: ...

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Key, Answer]]: ...

    def close(self) -> None: ...


class Language(NamedTuple):
    """How tokens and text turn into each other, and what ends a turn."""

    decode: Decode  # a turn of the policy
    observation_tokens: Callable[[str, Sequence[int]], tuple[int, ...]]  # the second: the policy's turn before it
    observation_text: Decode  # and back, also of tokens that were cut at their end
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...] = ()

    def ends_turn(self, tokens: Sequence[int]) -> bool:
        if not tokens:
            return False
        return tokens[-1] in self.stop_tokens or (
            bool(self.stop_strings) and any(stop in self.decode(tokens) for stop in self.stop_strings)
        )


class Outcome(NamedTuple):
    """An episode is over: with a reward, or with the reason why there is none."""

    episode: Episode
    reward: float | None
    reason: str = ""


class Runner:
    def __init__(self, engine: Engine, judge: Judge, language: Language, max_completion_tokens: int) -> None:
        self.engine = engine
        self.judge = judge
        self.language = language
        self.max_completion_tokens = max_completion_tokens
        self.episodes: dict[TrajectoryId, Episode] = {}
        self._judged: dict[Key, bool] = {}  # asked about, not answered yet; True: only a score will do

    @property
    def busy(self) -> bool:
        """The engine has something to do, rather than everybody waiting to be judged."""
        return len(self.episodes) > len(self._judged)

    def add(self, episode: Episode) -> None:
        """Begin, or go on where the prefix ends: perhaps its turn was over, and only judgement is missing."""
        self.episodes[episode.request.trajectory] = episode
        if self.language.ends_turn(episode.last_turn()):
            self._judge(episode, "stop")
        else:
            self._next_turn(episode)

    def step(self) -> list[Outcome]:
        """Let the engine go one step and hear the judges."""
        for sampled in self.engine.step():
            self._sampled(sampled, self.engine.version)
        answers = self.judge.poll() if self._judged else []
        outcomes = [self._answered(key, answer) for key, answer in answers]
        return [outcome for outcome in outcomes if outcome]

    def withdraw(self, ids: Iterable[TrajectoryId]) -> list[Episode]:
        """Take episodes out, wherever they are."""
        leaving = [self.episodes.pop(id) for id in list(ids) if id in self.episodes]
        for episode in leaving:
            self._judged.pop(episode.key, None)
        self.engine.withdraw([episode.request.trajectory for episode in leaving])
        self.engine.forget([episode.request.trajectory for episode in leaving])
        return leaving

    def _next_turn(self, episode: Episode) -> None:
        if episode.completion_tokens >= self.max_completion_tokens:
            self._judge(episode, "length")
        else:
            self.engine.submit(episode.job(self.max_completion_tokens))

    def _sampled(self, sampled: Sampled, version: Version) -> None:
        episode = self.episodes[sampled.id]
        if sampled.tokens:  # none if the context had no room for any
            episode.sampled(version, sampled.tokens, sampled.logprobs)
        if sampled.finish:
            self._judge(episode, sampled.finish)

    def _judge(self, episode: Episode, finish: str, more: tuple[Turn, ...] = ()) -> None:
        episode.finish = finish
        said = episode.transcript(self.language.decode, self.language.observation_text)
        transcript = (said or (Turn("policy", ""),)) + more
        self._judged[episode.key] = transcript[-1].role == "environment"
        self.judge.ask(episode.key, episode.row, transcript)

    def _answered(self, key: Key, answer: Answer) -> Outcome | None:
        if key not in self._judged:
            return None  # of an assignment that was withdrawn
        only_scored = self._judged.pop(key)
        episode = self.episodes[key[0]]
        if isinstance(answer, Observed) and not only_scored:
            self._observed(episode, answer.text)
            return None
        del self.episodes[key[0]]
        self.engine.forget([key[0]])
        if isinstance(answer, Scored):
            return Outcome(episode, answer.reward)
        return Outcome(episode, None, answer.reason if isinstance(answer, Faulted) else UNSCORED)

    def _observed(self, episode: Episode, text: str) -> None:
        """The next turn; or, where the observation leaves no room for one, as much of it as fits, and the reward."""
        room = self.max_completion_tokens - episode.completion_tokens
        tokens = self.language.observation_tokens(text, episode.last_turn())[:room]
        if room <= 0:
            self._judge(episode, "length", more=(Turn("environment", ""),))
            return
        episode.finish = ""
        episode.observed(tokens)
        self._next_turn(episode)
