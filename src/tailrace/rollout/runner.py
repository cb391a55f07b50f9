"""Plays episodes on one engine: submits turns, has them judged, goes on or ends. No process, no wire.

The rollout worker and the evaluation both drive a `Runner`; it owns the episodes between `add` and their `Outcome`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from tailrace.engines.base import Engine
from tailrace.envs.base import UNSCORED, Answer, Faulted, Observed, Scored, Turn
from tailrace.protocol import JudgedTurn
from tailrace.rollout.episode import Decode, Episode
from tailrace.types import Row, TrajectoryId, id_bytes

Key = tuple[int, int]


class RewardJudge(Protocol):
    """Whoever answers to the policy's turns, in its own time. A transcript that ends with the environment's is that of
    an episode without tokens for another turn: it can only be scored."""

    def ask(self, key: Key, row: Row, transcript: tuple[Turn, ...]) -> bool | None:
        """True if the answer is certain to end the episode."""
        ...

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Key, Answer]]: ...

    def close(self) -> None: ...


class Language(NamedTuple):
    """How tokens and text turn into each other, and what ends a turn."""

    decode: Decode  # a turn of the policy
    observation_tokens: Callable[[str, Sequence[int]], Sequence[int]]  # the second: the policy's turn before it
    observation_text: Decode  # and back, also of tokens that were cut at their end
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...] = ()

    def ends_turn(self, tokens: Sequence[int]) -> bool:
        if not tokens:
            return False
        return tokens[-1] in self.stop_tokens or (
            bool(self.stop_strings) and any(stop in self.decode(tokens) for stop in self.stop_strings)
        )


class PendingTurn(NamedTuple):
    """A turn that is with a judge."""

    since: float
    final: bool  # the answer ends the episode
    told: bool = False  # by `take_started`


class Outcome(NamedTuple):
    """An episode is over: with a reward, or with the reason why there is none."""

    episode: Episode
    reward: float | None
    reason: str = ""
    parts: dict[str, float] | None = None  # of the reward


class Runner:
    def __init__(
        self,
        engine: Engine,
        judge: RewardJudge,
        language: Language,
        max_completion_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.judge = judge
        self.language = language
        self.max_completion_tokens = max_completion_tokens
        self.episodes: dict[TrajectoryId, Episode] = {}
        self._clock = clock
        self._judged: dict[Key, PendingTurn] = {}  # asked about, not answered yet
        self._resumed: list[JudgedTurn] = []

    @property
    def busy(self) -> bool:
        """The engine has something to do, rather than everybody waiting to be judged."""
        return len(self.episodes) > len(self._judged)

    def unfinished(self) -> list[TrajectoryId]:
        """Episodes of which something may still be generated."""
        scored = {key[0] for key, one in self._judged.items() if one.final}
        return [id for id in self.episodes if id not in scored]

    def take_started(self, seconds: float) -> tuple[JudgedTurn, ...]:
        """Turns that a judge has had for so long, each once."""
        until = self._clock() - seconds
        long = {key: one for key, one in self._judged.items() if one.since <= until and not one.told}
        self._judged |= {key: one._replace(told=True) for key, one in long.items()}
        return tuple([JudgedTurn(*key, self.episodes[key[0]].turn, one.final) for key, one in long.items()])

    def take_resumed(self) -> tuple[JudgedTurn, ...]:
        """Turns that have begun since the last call, after a judge had had those before them for long."""
        resumed, self._resumed = self._resumed, []
        return tuple([one for one in resumed if self._is_at(one)])

    def _is_at(self, turn: JudgedTurn) -> bool:
        episode = self.episodes.get(turn.trajectory)
        return episode is not None and (episode.key[1], episode.turn) == (turn.attempt, turn.turn)

    def add(self, episode: Episode) -> None:
        """Begin, or go on where the prefix ends: perhaps its turn was over, and only judgement is missing."""
        self.episodes[episode.request.trajectory] = episode
        if self.language.ends_turn(episode.last_turn().tolist()):
            self._judge(episode, "stop")
        else:
            self._next_turn(episode)

    def step(self) -> list[Outcome]:
        """Let the engine go one step and hear the judges."""
        output = self.engine.step()
        version = self.engine.version if output.version is None else output.version
        for id, tokens, logprobs, finish in output.additions():
            if tokens:  # none if the context had no room for any
                self.episodes[id].sampled(version, tokens, logprobs)
            if finish:
                self._judge(self.episodes[id], finish)
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

    def close(self) -> None:
        self.judge.close()
        if (close := getattr(self.engine, "close", None)) is not None:  # one with processes of its own
            close()

    def _next_turn(self, episode: Episode) -> None:
        if episode.completion_tokens >= self.max_completion_tokens:
            self._judge(episode, "length")
        else:
            self.engine.submit(episode.job(self.max_completion_tokens))

    def _judge(self, episode: Episode, finish: str, more: tuple[Turn, ...] = ()) -> None:
        episode.finish = finish
        said = episode.transcript(self.language.decode, self.language.observation_text)
        transcript = (said or (Turn("policy", ""),)) + more
        final = bool(self.judge.ask(episode.key, episode.row, transcript)) or transcript[-1].role == "environment"
        self._judged[episode.key] = PendingTurn(self._clock(), final)

    def _answered(self, key: Key, answer: Answer) -> Outcome | None:
        if key not in self._judged:
            return None  # of an assignment that was withdrawn
        judged, episode = self._judged.pop(key), self.episodes[key[0]]
        if isinstance(answer, Observed) and not judged.final:
            self._observed(episode, answer.text)
            if judged.told and key not in self._judged:
                self._resumed.append(JudgedTurn(*key, episode.turn))
            return None
        del self.episodes[key[0]]
        self.engine.forget([key[0]])
        if isinstance(answer, Scored):
            return Outcome(episode, answer.reward, parts=answer.parts)
        return Outcome(episode, None, answer.reason if isinstance(answer, Faulted) else UNSCORED)

    def _observed(self, episode: Episode, text: str) -> None:
        """The next turn; or, where the observation leaves no room for one, as much of it as fits, and the reward."""
        room = self.max_completion_tokens - episode.completion_tokens
        tokens = self.language.observation_tokens(text, episode.last_turn().tolist())[:room]
        if room <= 0:
            episode.turn += 1
            self._judge(episode, "length", more=(Turn("environment", ""),))
            return
        episode.finish = ""
        episode.observed(id_bytes(tokens))
        self._next_turn(episode)
