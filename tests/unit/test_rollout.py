"""Episodes and the runner that plays them, with an engine and a judge that follow a script."""

from __future__ import annotations

from tailrace.config import Config, with_values
from tailrace.engines.base import Job, Load, Sampled
from tailrace.engines.emulated import EmulatedEngine
from tailrace.envs.base import Answer, Faulted, Observed, Scored, Turn
from tailrace.protocol import Request
from tailrace.rollout.episode import Episode, merged
from tailrace.rollout.runner import Key, Language, Runner
from tailrace.types import Row, Segment

END = 99
ROW = Row(5, (1, 2, 3), "a question", {"answer": "7"})
LANGUAGE = Language(
    decode=lambda tokens: " ".join(map(str, tokens)),
    observation_tokens=lambda text, after: tuple(map(int, text.split())),
    stop_tokens=frozenset({END}),
)


class Scripted:
    """An engine that says what it is told to, one token of every sequence per step."""

    kv_capacity, roofline = 1000, 8

    def __init__(self, *turns: tuple[int, ...]) -> None:
        self.version = 3
        self.turns = list(turns)
        self.jobs: dict[int, Job] = {}
        self.script: dict[int, list[int]] = {}
        self.seen: list[Job] = []
        self.forgotten: list[int] = []

    def submit(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.seen.append(job)
        self.script[job.id] = list(self.turns.pop(0))

    def step(self) -> list[Sampled]:
        return [self._next(id) for id in list(self.jobs)]

    def _next(self, id: int) -> Sampled:
        token = self.script[id].pop(0)
        finish = "stop" if token == END else "" if self.script[id] else "length"
        if finish:
            del self.jobs[id]
        return Sampled(id, (token,), (-0.5,), finish)

    def withdraw(self, ids):
        return [self.jobs.pop(id) for id in ids if id in self.jobs]

    def forget(self, ids):
        self.forgotten += ids

    def load_weights(self, version, tensors, keep_kv=False):
        self.version = version

    def load(self) -> Load:
        return Load(0, len(self.jobs), 0)

    def counters(self):
        return {}


class Verdicts:
    """A judge that gives these answers in turn, when polled."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Key, tuple[Turn, ...]]] = []
        self.waiting: list[Key] = []

    def ask(self, key, row, transcript):
        self.asked.append((key, transcript))
        self.waiting.append(key)

    def poll(self, timeout_s: float = 0.0):
        waiting, self.waiting = self.waiting, []
        return [(key, self.answers.pop(0)) for key in waiting]

    def close(self):
        pass


def episode(prefix: tuple[Segment, ...] = (), trajectory: int = 8, epoch: int = 1) -> Episode:
    return Episode(Request(trajectory, epoch, 2, ROW.id, 3, resume=bool(prefix)), ROW, prefix, version=3)


def play(runner: Runner, limit: int = 50):
    outcomes = []
    while runner.episodes and limit:
        outcomes += runner.step()
        limit -= 1
    assert limit, "it never ended"
    return outcomes


def test_a_single_turn_is_judged_and_scored():
    engine = Scripted((10, 11, END))
    runner = Runner(engine, Verdicts(Scored(1.0)), LANGUAGE, 20)
    runner.add(episode())
    [outcome] = play(runner)
    assert (outcome.reward, outcome.episode.finish) == (1.0, "stop")
    assert outcome.episode.take_growth() == (Segment(3, (10, 11, END), (-0.5, -0.5, -0.5)),)
    meta = outcome.episode.meta(1.0)
    assert (meta.tokens, meta.oldest, meta.newest) == (3, 3, 3)
    assert engine.forgotten == [8]


def test_what_a_tool_says_is_inserted_and_not_the_policys():
    engine, judge = Scripted((10, END), (12, END)), Verdicts(Observed("70 71"), Scored(0.0))
    runner = Runner(engine, judge, LANGUAGE, 20)
    runner.add(episode())
    [outcome] = play(runner)
    growth = outcome.episode.take_growth()
    assert [(one.version, one.tokens) for one in growth] == [(3, (10, END)), (None, (70, 71)), (3, (12, END))]
    assert engine.seen[1].tokens == (1, 2, 3, 10, END, 70, 71)
    assert [turn.role for turn in judge.asked[-1][1]] == ["policy", "environment", "policy"]
    assert outcome.episode.meta().tokens == 6


def test_an_episode_goes_on_from_any_prefix():
    whole = (Segment(2, (10, END), (-1.0, -1.0)), Segment(None, (70,)), Segment(3, (12, END), (-1.0, -1.0)))
    for cut in range(3):
        engine = Scripted((12, END)) if cut == 2 else Scripted((10, END), (12, END))
        answers = [Observed("70"), Scored(1.0)] if cut < 2 else [Scored(1.0)]
        runner = Runner(engine, Verdicts(*answers), LANGUAGE, 20)
        if cut == 1:  # the turn was over, but its judgement was lost with the replica
            engine.turns = [(12, END)]
        runner.add(episode(whole[:cut]))
        [outcome] = play(runner)
        assert outcome.episode.tokens == [1, 2, 3, 10, END, 70, 12, END]
        assert outcome.reward == 1.0


def test_versions_in_the_middle_of_a_turn_are_kept_apart():
    engine = Scripted((10, 11, END))
    runner = Runner(engine, Verdicts(Scored(1.0)), LANGUAGE, 20)
    one = episode()
    runner.add(one)
    runner.step()
    engine.load_weights(4, {})
    play(runner)
    assert [(part.version, part.tokens) for part in one.take_growth()] == [(3, (10,)), (4, (11, END))]
    assert (one.meta().oldest, one.meta().newest) == (3, 4)


def test_an_answer_to_an_assignment_that_is_gone_is_ignored():
    judge = Verdicts(Scored(1.0), Scored(0.0))
    runner = Runner(Scripted((END,), (END,)), judge, LANGUAGE, 20)
    runner.add(episode(epoch=1))
    for sampled in runner.engine.step():
        runner._sampled(sampled, 3)
    assert [one.key for one in runner.withdraw([8])] == [(8, 1)]
    runner.add(episode(epoch=2))
    outcomes = play(runner)
    assert [(outcome.episode.key, outcome.reward) for outcome in outcomes] == [((8, 2), 0.0)]


def test_a_fault_is_an_outcome_without_a_reward():
    runner = Runner(Scripted((END,)), Verdicts(Faulted("the reward hung")), LANGUAGE, 20)
    runner.add(episode())
    assert [(one.reward, one.reason) for one in play(runner)] == [(None, "the reward hung")]


def attempt(failures: int, refused: tuple[Turn, ...]) -> tuple[Answer, tuple[Turn, ...]]:
    """One attempt at a sample whose reward cannot stand a certain answer."""

    class Squeamish(Verdicts):
        def ask(self, key, row, transcript):
            self.answers.append(Faulted("not this one") if transcript == refused else Scored(1.0))
            super().ask(key, row, transcript)

    costs = {"costs.decode_step": 1e-9, "rollout.kv_tokens": 4000}
    judge = Squeamish()
    runner = Runner(EmulatedEngine(with_values(Config(), costs), seed=1), judge, LANGUAGE, 30)
    runner.add(Episode(Request(8, 1 + failures, 2, ROW.id, 3, failures=failures), ROW, (), version=3))
    (outcome,) = play(runner)
    answer = Faulted(outcome.reason) if outcome.reward is None else Scored(outcome.reward)
    return answer, judge.asked[0][1]


def test_a_failure_that_its_tokens_caused_does_not_come_again():
    _, transcript = attempt(failures=0, refused=())
    assert attempt(0, refused=transcript) == (Faulted("not this one"), transcript)
    assert attempt(1, refused=transcript)[0] == Scored(1.0)


def test_tokens_run_out_in_a_turn_or_between_two():
    runner = Runner(Scripted((10, 11)), Verdicts(Scored(0.0)), LANGUAGE, 2)
    runner.add(episode())
    assert play(runner)[0].episode.finish == "length"
    runner = Runner(Scripted((10, END)), Verdicts(Observed("70 71 72")), LANGUAGE, 4)
    runner.add(episode())
    [outcome] = play(runner)
    assert (outcome.episode.finish, outcome.reward) == ("length", 0.0)


def test_neighbours_of_one_origin_are_merged():
    parts = [Segment(1, (1,), (-1.0,)), Segment(1, (2,), (-2.0,)), Segment(None, (3,)), Segment(2, (4,), (-4.0,))]
    assert list(merged(parts)) == [Segment(1, (1, 2), (-1.0, -2.0)), Segment(None, (3,)), Segment(2, (4,), (-4.0,))]
