"""What every engine has to keep, as checks that anybody can run on theirs: native, emulated, vLLM, or your own.

    subject = EngineUnderTest(engine, ...)
    check_engine(subject)                                       # or, one test each:
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_it_keeps_the_contract(check): check(subject)

Each check takes the engine with nothing to do and leaves it so; what does not hold is an `AssertionError` with a
sentence. An engine may take its time: there is a deadline for each check, and it is the only use of a clock here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tailrace.engines.base import Engine, Finish, Job, StepOutput
from tailrace.types import TrajectoryId, Version, id_bytes, token_ids

Truth = Callable[[Version, Sequence[int], int], Sequence[float]]
WITHIN_S = 120.0  # for what one check asks of an engine
FEW, MANY = 4, 24
FINISHES = ("", "stop", "length")


class EngineUnderTest(msgspec.Struct, frozen=True):
    """An engine, and what the checks need to know of it."""

    engine: Engine
    prompts: Sequence[Sequence[int]]  # four or more, whose answers may be long
    max_tokens: int  # that a sequence may grow by, 24 or more
    weights: Callable[[Version], Any]  # as `load_weights` takes them; other ones for every version
    # log-probs of tokens[first:] under a version, by another program; None: an engine whose log-probs mean nothing
    truth: Truth | None = None
    tolerance: float = 1e-4  # of a log-prob against the truth
    stop_tokens: frozenset[int] = frozenset()  # after which a turn ends
    within_s: float = WITHIN_S


class PlayedAnswers:
    """Sequences that an engine was given, and all that came of them."""

    def __init__(self, subject: EngineUnderTest) -> None:
        self.engine = subject.engine
        self._until = time.monotonic() + subject.within_s
        self.jobs: dict[TrajectoryId, Job] = {}
        self.tokens: dict[TrajectoryId, list[int]] = {}
        self.logprobs: dict[TrajectoryId, list[float]] = {}
        self.versions: dict[TrajectoryId, list[Version]] = {}
        self.finish: dict[TrajectoryId, Finish] = {}

    def submit(self, job: Job) -> None:
        self.jobs[job.id] = job
        for collection in (self.tokens, self.logprobs, self.versions):
            collection.setdefault(job.id, [])
        self.finish.pop(job.id, None)
        self.engine.submit(job)

    @property
    def unfinished(self) -> list[TrajectoryId]:
        return [id for id in self.jobs if id not in self.finish]

    def step(self) -> None:
        output = self.engine.step()
        _check_shape(output)
        version = self.engine.version if output.version is None else output.version
        for id, tokens, logprobs, finish in output.additions():
            assert id in self.jobs, f"a step had tokens of {id}, which was never submitted or is withdrawn"
            assert id not in self.finish, f"a step had tokens of {id}, whose turn had ended"
            new = token_ids(tokens).tolist()
            self.tokens[id] += new
            self.logprobs[id] += np.frombuffer(logprobs, "<f4").tolist()
            self.versions[id] += [version] * len(new)
            if finish:
                self.finish[id] = finish

    def until(self, reached: Callable[[], object], what: str) -> None:
        while not reached():
            assert time.monotonic() < self._until, f"the engine did not come to {what} in time"
            self.step()

    def finish_all(self) -> None:
        self.until(lambda: not self.unfinished, "the end of every turn")

    def some_tokens(self, count: int) -> None:
        """Until each has so many, or has ended."""
        waiting = list(self.jobs)
        self.until(lambda: all(id in self.finish or len(self.tokens[id]) >= count for id in waiting), f"{count} tokens")

    def withdraw(self, ids: Iterable[TrajectoryId]) -> dict[TrajectoryId, Job]:
        ids = list(ids)
        found = {job.id: job for job in self.engine.withdraw(ids)}
        self.engine.forget(ids)
        for id in ids:
            self.jobs.pop(id, None)
        return found


def _check_shape(output: StepOutput) -> None:
    count = sum(output.counts)
    assert len(output.ids) == len(output.counts) == len(output.finish), "ids, counts and ends are not equally many"
    assert len(output.tokens) == count, f"a step counts {count} tokens and has {len(output.tokens)}"
    assert len(output.logprobs) == count, f"a step counts {count} tokens and has {len(output.logprobs)} log-probs"
    assert output.tokens.dtype == np.int32, "token ids are not int32"
    assert output.logprobs.dtype == np.float32, "log-probs are not float32"
    assert set(output.finish) <= set(FINISHES), f"a turn ends for none of {FINISHES}"
    assert bool(np.isfinite(output.logprobs).all()), "a log-prob is not finite"
    assert bool((output.logprobs <= 1e-3).all()), "a log-prob is above 0"


def _job(subject: EngineUnderTest, id: TrajectoryId, max_tokens: int = 0) -> Job:
    prompt = subject.prompts[id % len(subject.prompts)]
    return Job(id, id % len(subject.prompts), id_bytes(prompt), len(prompt), max_tokens or subject.max_tokens)


def _begun(subject: EngineUnderTest, count: int = FEW, max_tokens: int = 0, first: int = 1000) -> PlayedAnswers:
    answers = PlayedAnswers(subject)
    for id in range(first, first + count):
        answers.submit(_job(subject, id, max_tokens))
    return answers


def _agree_with_truth(subject: EngineUnderTest, answers: PlayedAnswers) -> None:
    """Every token, under the version that it is said to be of."""
    if subject.truth is None:
        return
    for id, job in answers.jobs.items():
        prompt, tokens = token_ids(job.tokens).tolist(), answers.tokens[id]
        for version in set(answers.versions[id]):
            wanted = subject.truth(version, prompt + tokens, len(prompt))
            of_it = [at for at, one in enumerate(answers.versions[id]) if one == version]
            worst = max(abs(wanted[at] - answers.logprobs[id][at]) for at in of_it)
            assert worst <= subject.tolerance, (
                f"log-probs of version {version} are off by {worst:.2g}, more than {subject.tolerance:g}"
            )


# ----------------------------------------------------------------------------------------------------------- the checks


def answers_have_a_logprob_for_every_token(subject: EngineUnderTest) -> None:
    answers = _begun(subject)
    answers.finish_all()
    for id in answers.jobs:
        assert len(answers.tokens[id]) == len(answers.logprobs[id])
        assert answers.tokens[id], "a turn ended without a token"
        assert set(answers.versions[id]) == {subject.engine.version}, "tokens are not of the engine's version"
    _agree_with_truth(subject, answers)


def a_turn_ends_at_its_limit_or_at_a_stop_token(subject: EngineUnderTest) -> None:
    answers = _begun(subject, max_tokens=7)
    answers.finish_all()
    for id, finish in answers.finish.items():
        tokens = answers.tokens[id]
        assert len(tokens) <= 7, f"{len(tokens)} tokens were sampled where 7 were asked for"
        assert finish == "stop" or len(tokens) == 7, f"a turn ended for its length after {len(tokens)} of 7 tokens"
        assert not subject.stop_tokens & set(tokens[:-1]), "a turn went on after a stop token"
        ended = tokens[-1] in subject.stop_tokens
        assert not ended or finish == "stop", "a stop token ended a turn for its length"


def a_job_without_room_ends_without_a_token(subject: EngineUnderTest) -> None:
    answers = PlayedAnswers(subject)
    answers.submit(msgspec.structs.replace(_job(subject, 1000), max_tokens=0))
    answers.finish_all()
    assert not answers.tokens[1000], "a job with room for no token got some"
    assert answers.finish[1000] == "length", "a job with room for no token did not end for its length"


def a_withdrawn_job_has_every_token_and_goes_on(subject: EngineUnderTest) -> None:
    answers = _begun(subject)
    answers.some_tokens(3)
    leaving = answers.unfinished
    before = {id: list(answers.tokens[id]) for id in leaving}
    jobs = answers.withdraw([*leaving, 999_999])
    assert set(jobs) == set(leaving), "withdraw did not return those that had not ended, and no others"
    _check_withdrawn(subject, jobs, before)
    again = PlayedAnswers(subject)
    for job in jobs.values():
        again.submit(job)
    again.finish_all()
    _agree_with_truth(subject, again)
    for id, job in jobs.items():
        whole = len(before[id]) + len(again.tokens[id])
        assert again.finish[id] == "stop" or whole == subject.max_tokens, f"{id} did not go on to its limit"
        assert len(again.tokens[id]) <= job.max_tokens, f"{id} was given more tokens than were left"


def _check_withdrawn(
    subject: EngineUnderTest, jobs: Mapping[TrajectoryId, Job], before: Mapping[TrajectoryId, list[int]]
) -> None:
    for id, job in jobs.items():
        prompt = list(subject.prompts[id % len(subject.prompts)])
        assert token_ids(job.tokens).tolist() == prompt + before[id], f"{id} does not have its tokens so far"
        assert job.prompt_tokens == len(prompt), f"{id} has forgotten how long its prompt is"
        left = subject.max_tokens - len(before[id])
        assert job.max_tokens == left, f"{id} may go on for {job.max_tokens} tokens, not for the {left} that are left"


def nothing_comes_of_what_was_withdrawn(subject: EngineUnderTest) -> None:
    answers = _begun(subject)
    answers.some_tokens(2)
    answers.withdraw(list(answers.jobs))
    others = _begun(subject, count=2, first=2000)
    others.finish_all()  # a token of those before would be of none that it knows
    assert subject.engine.withdraw([1000, 1001]) == [], "what was withdrawn could be withdrawn again"


def another_turn_goes_on_after_what_was_inserted(subject: EngineUnderTest) -> None:
    answers = _begun(subject, count=2, max_tokens=5)
    answers.finish_all()
    for id, job in list(answers.jobs.items()):
        said = token_ids(job.tokens).tolist() + answers.tokens[id]
        inserted = said + list(subject.prompts[0][-2:])
        next_turn = Job(id, job.group, id_bytes(inserted), job.prompt_tokens, 5)
        answers.tokens[id], answers.logprobs[id], answers.versions[id] = [], [], []
        answers.submit(next_turn)
    answers.finish_all()
    _agree_with_truth(subject, answers)
    subject.engine.forget(list(answers.jobs))


def many_sequences_all_end(subject: EngineUnderTest) -> None:
    answers = _begun(subject, count=MANY, max_tokens=6)
    answers.finish_all()
    assert len(answers.finish) == MANY


def new_weights_change_version_and_logprobs_of_running_answers(subject: EngineUnderTest) -> None:
    """Several times under load. A token that was sampled before an update is of the version before."""
    engine = subject.engine
    answers = _begun(subject)
    first = engine.version
    for version in (first + 1, first + 2):
        reached = 2 + min(len(tokens) for tokens in answers.tokens.values())
        answers.some_tokens(reached)
        engine.load_weights(version, subject.weights(version))
        assert engine.version == version, f"the engine says version {engine.version} after loading {version}"
    answers.finish_all()
    for id in answers.jobs:
        assert answers.versions[id] == sorted(answers.versions[id]), "a token of older weights came after newer ones"
        assert answers.versions[id][0] == first, "the first tokens are not of the first weights"
    _agree_with_truth(subject, answers)


def kept_keys_and_values_leave_answers_whole(subject: EngineUnderTest) -> None:
    engine = subject.engine
    answers = _begun(subject)
    answers.some_tokens(2)
    engine.load_weights(engine.version + 1, subject.weights(engine.version + 1), keep_kv=True)
    answers.finish_all()
    for id, finish in answers.finish.items():
        assert finish == "stop" or len(answers.tokens[id]) == subject.max_tokens, f"{id} lost or won tokens"


def it_says_how_full_it_is(subject: EngineUnderTest) -> None:
    engine = subject.engine
    assert engine.kv_capacity > 0, "the engine has no room for keys and values"
    assert engine.roofline > 0, "the engine has no roofline"
    answers = _begun(subject)
    answers.some_tokens(2)
    stats = engine.stats()
    inside = len(answers.unfinished)
    assert stats.running + stats.waiting == inside, f"{stats} of {inside} sequences"
    assert 0 <= stats.kv_tokens <= engine.kv_capacity, f"{stats} in a pool of {engine.kv_capacity}"
    answers.finish_all()


def nothing_is_left_at_the_end(subject: EngineUnderTest) -> None:
    engine = subject.engine
    answers = _begun(subject)
    answers.some_tokens(2)
    answers.withdraw(list(answers.jobs))
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0), f"{stats} with nothing to do"
    assert stats.kv_tokens == 0, f"{stats.kv_tokens} KV tokens are needed by nobody"
    output = engine.step()
    assert not output.ids, "a step had something where nothing was to be done"


def its_counters_grow(subject: EngineUnderTest) -> None:
    """By what was done: control and the simulator learn from them what generating costs."""
    engine = subject.engine
    engine.load_weights(engine.version + 1, subject.weights(engine.version + 1))  # no KV of before is of use
    before = engine.counters()
    answers = _begun(subject)
    answers.finish_all()
    after = engine.counters()
    assert set(before) == set(after), "its counters change their names"
    grown = {name: after[name] - before[name] for name in after}
    for name in ("busy_s", "steps", "decoded", "kv_read", "prefilled"):
        assert grown[name] > 0, f"its counter {name} stands still"
    _check_work(grown, {id: job.length for id, job in answers.jobs.items()}, answers.tokens)


def _check_work(
    grown: Mapping[str, float], prompts: Mapping[TrajectoryId, int], tokens: Mapping[TrajectoryId, list[int]]
) -> None:
    """Of answers that were played together, to their ends and by nobody else's side."""
    counts = {id: len(those) for id, those in tokens.items()}
    sampled, read = sum(counts.values()), sum(n * prompts[id] + n * (n - 1) // 2 for id, n in counts.items())
    assert grown["decoded"] >= sampled, f"{sampled} tokens were sampled, and it counts {grown['decoded']:g} decoded"
    assert grown["steps"] <= grown["decoded"], f"{grown['steps']:g} decode steps for {grown['decoded']:g} tokens"
    assert grown["prefilled"] <= sum(prompts.values()), f"{grown['prefilled']:g} tokens prefilled of {prompts}"
    assert read / 2 <= grown["kv_read"] <= read * 2, f"it counts {grown['kv_read']:g} KV tokens read where {read} were"


CHECKS: tuple[Callable[[EngineUnderTest], None], ...] = (
    answers_have_a_logprob_for_every_token,
    a_turn_ends_at_its_limit_or_at_a_stop_token,
    a_job_without_room_ends_without_a_token,
    a_withdrawn_job_has_every_token_and_goes_on,
    nothing_comes_of_what_was_withdrawn,
    another_turn_goes_on_after_what_was_inserted,
    many_sequences_all_end,
    new_weights_change_version_and_logprobs_of_running_answers,
    kept_keys_and_values_leave_answers_whole,
    it_says_how_full_it_is,
    nothing_is_left_at_the_end,
    its_counters_grow,
)


def check_engine(subject: EngineUnderTest) -> None:
    """All of them, on an engine that has some weights and nothing to do."""
    for check in CHECKS:
        check(subject)
