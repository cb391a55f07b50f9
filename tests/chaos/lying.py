"""`tailrace worker` of somebody who has a key and lies: the component's process with one thing changed.

python lying.py LIE worker --join ... --key ...
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from msgspec.structs import replace

LIE = "TAILRACE_TEST_LIE"


def tokens(worker: Any) -> None:
    """Other tokens than were drawn."""
    _change_output(lambda out: out._replace(tokens=((out.tokens - 97 + 1) % 26 + 97).astype(np.int32)))


def logprobs(worker: Any) -> None:
    _change_output(lambda out: out._replace(logprobs=out.logprobs / 2))


def best_of_many(worker: Any) -> None:
    """Drawn again with other numbers, as somebody does who hands in the best of many."""
    from tailrace.engines.emulated import EmulatedEngine

    honest = EmulatedEngine.__init__

    def changed(self: Any, config: Any, seed: int, *rest: Any) -> None:
        honest(self, config, seed, *rest)
        self._seed = seed + 1

    EmulatedEngine.__init__ = changed  # type: ignore[method-assign]


def best_of_many_for_real(worker: Any) -> None:
    """The same with the native engine."""
    from tailrace.engines import native

    honest = native.build_engine
    native.build_engine = lambda config, seed, *rest: honest(config, seed + 1, *rest)


def cut_short(worker: Any) -> None:
    """It stops when it pleases."""
    from tailrace.engines.emulated import EmulatedEngine

    honest = EmulatedEngine._end_of_turn

    def changed(self: Any, job: Any) -> Any:
        count, finish = honest(self, job)
        return count // 2, finish

    EmulatedEngine._end_of_turn = changed  # type: ignore[method-assign]


def other_version(worker: Any) -> None:
    """It says that its tokens are of another version."""
    from tailrace.rollout.episode import Episode

    honest = Episode.sampled
    Episode.sampled = lambda self, version, *rest: honest(self, version + 1, *rest)  # type: ignore[method-assign]


def a_reward(worker: Any) -> None:
    from tailrace.protocol import Finished

    worker._ending = lambda self, outcome: Finished(self.spec.id, outcome.episode.meta(1.0))


def another_sample(worker: Any) -> None:
    """It hands in what it was not given, but for its own attempt number that is another's."""
    from tailrace.protocol import HandedIn

    def changed(self: Any, outcome: Any) -> Any:
        meta = outcome.episode.meta(None)
        others = tuple(replace(meta, id=id, attempt=1) for id in range(meta.id + 20))
        return HandedIn(self.spec.id, others)

    worker._ending = changed


def a_failure(worker: Any) -> None:
    """It would like other random numbers."""
    from tailrace.protocol import SampleFailed

    def changed(self: Any, outcome: Any) -> Any:
        meta = outcome.episode.meta(None)
        return SampleFailed(self.spec.id, meta.id, meta.attempt, "I do not like it")

    worker._ending = changed


def an_older_sample(worker: Any) -> None:
    """It hands in the tokens of its first sample again and again."""
    from tailrace.engines.emulated import EmulatedEngine

    honest, first = EmulatedEngine._tokens, list[Any]()

    def changed(self: Any, jobs: Any, *rest: Any) -> Any:
        first.extend(jobs[: 1 - len(first)])
        return honest(self, first * len(jobs), *rest)

    EmulatedEngine._tokens = changed  # type: ignore[method-assign]


def nothing_at_all(worker: Any) -> None:
    """Completions without a token."""
    from tailrace.rollout.episode import Episode

    Episode.sampled = lambda self, *rest: None  # type: ignore[method-assign]


def too_long(worker: Any) -> None:
    from tailrace.rollout.episode import Episode

    honest = Episode.sampled
    Episode.sampled = lambda self, version, *data: honest(self, version, *[one * 10_000 for one in data])  # type: ignore[method-assign]


def nobody_sampled_it(worker: Any) -> None:
    """Its tokens are said to be an environment's."""
    from tailrace.rollout.episode import Episode

    Episode.sampled = lambda self, version, tokens, logprobs: tokens and self.observed(tokens)  # type: ignore[method-assign]


def no_numbers(worker: Any) -> None:
    _change_output(lambda out: out._replace(logprobs=out.logprobs * np.float32("nan")))


def more_than_certain(worker: Any) -> None:
    """Probabilities above 1."""
    _change_output(lambda out: out._replace(logprobs=np.ones_like(out.logprobs)))


def no_tokens_of_ours(worker: Any) -> None:
    _change_output(lambda out: out._replace(tokens=-out.tokens))


def others_data(worker: Any) -> None:
    """It asks for samples that others have."""
    honest = worker._generate

    def changed(self: Any, command: Any) -> None:
        honest(self, command)
        for id in range(command.requests[0].trajectory + 40):
            self.samples.fetch(id, 1, 0)

    worker._generate = changed


def a_flood(worker: Any) -> None:
    from tailrace.protocol import Progressed

    _say(worker, lambda self: [Progressed(self.spec.id, 1, number, 0, 0) for number in range(10_000)])


def an_endless_engine(worker: Any) -> None:
    """Its engine has worked for longer than there is a word for in the journal."""
    from tailrace.protocol import EngineWork, Progressed

    work = EngineWork(float("inf"), 1, 1, 1, 1)
    _say(worker, lambda self: [Progressed(self.spec.id, self.spec.incarnation, 0, 0, 0, work)])


def an_engine_beyond_reason(worker: Any) -> None:
    """It needs no time for a great deal. This is for it alone to say, and nobody else's work depends on it."""
    from tailrace.protocol import EngineWork, Progressed

    work = [EngineWork(5e-324 * n, n, n, n, n) for n in range(20)]
    _say(worker, lambda self: [Progressed(self.spec.id, self.spec.incarnation, 0, 0, 0, one) for one in work])


def very_many_samples(worker: Any) -> None:
    """In one message, and none of them anybody's."""
    from tailrace.protocol import HandedIn, TrajectoryMeta

    unknown = tuple(TrajectoryMeta(10**6 + id, 1, 5, 0, 0, "stop", None) for id in range(5000))
    _say(worker, lambda self: [HandedIn(self.spec.id, unknown)])


def a_long_message(worker: Any) -> None:
    from tailrace.protocol import PullFailed

    _say(worker, lambda self: [PullFailed(self.spec.id, 1, 0, "x" * (2 << 20))])


def _say(worker: Any, events: Any) -> None:
    """With its first work."""
    honest = worker._generate

    def changed(self: Any, command: Any) -> None:
        honest(self, command)
        for event in events(self):
            self.controller.report(event)

    worker._generate = changed


def _change_output(change: Any) -> None:
    from tailrace.engines.emulated import EmulatedEngine

    honest = EmulatedEngine._output
    EmulatedEngine._output = lambda self, *rest: change(honest(self, *rest))  # type: ignore[method-assign]


LIES = {
    each.__name__: each
    for each in (
        *(tokens, logprobs, best_of_many, best_of_many_for_real, cut_short),
        *(other_version, a_reward, another_sample, a_failure, an_older_sample, nothing_at_all, too_long),
        *(nobody_sampled_it, no_numbers, more_than_certain, no_tokens_of_ours, others_data),
        *(a_flood, very_many_samples, a_long_message, an_endless_engine, an_engine_beyond_reason),
    )
}


def _as_component() -> None:
    from tailrace.rollout.worker import RolloutWorker
    from tailrace.runtime import component

    LIES[os.environ[LIE]](RolloutWorker)
    component.main()


def _as_worker(words: list[str]) -> int:
    """Its components are started from this very file."""
    from tailrace import cli
    from tailrace.runtime import local

    honest = local.subprocess.Popen

    def start(command: list[str], **how: Any) -> Any:
        return honest([sys.executable, __file__] if "tailrace.runtime.component" in command else command, **how)

    local.subprocess.Popen = start  # type: ignore[misc]
    return cli.main(words)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _as_component()
    else:
        os.environ[LIE] = sys.argv[1]
        sys.exit(_as_worker(sys.argv[2:]))
