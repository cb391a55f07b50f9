"""Episodes and the runner that plays them, with an engine and a judge that follow a script."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from buffers import Added, ids_of, output_of
from tailrace.config import Config, with_values
from tailrace.engines.base import EngineStats, Job, StepOutput
from tailrace.engines.emulated import EmulatedEngine
from tailrace.envs.base import Answer, Faulted, Observed, Scored, Turn
from tailrace.launch import models
from tailrace.protocol import JudgedTurn, Request
from tailrace.rollout.build import CoinJudge
from tailrace.rollout.episode import Episode
from tailrace.rollout.evaluate import Evaluated
from tailrace.rollout.runner import Key, Language, Runner
from tailrace.scoring import EvalResult, PromptScore, summed_up
from tailrace.types import Row, Segment, id_bytes

END = 99
REWARDS = (0.5, 0.6, 3.0, -1.0, None)
ROW = Row(5, id_bytes((1, 2, 3)), "a question", {"answer": "7"})
LANGUAGE = Language(
    decode=lambda tokens: " ".join(map(str, tokens)),
    observation_tokens=lambda text, after: tuple(map(int, text.split())),
    observation_text=lambda tokens: "seen " + " ".join(map(str, tokens)),
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
        self.seen: list[list[int]] = []
        self.forgotten: list[int] = []

    def submit(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.seen.append(ids_of(job))
        self.script[job.id] = list(self.turns.pop(0))

    def step(self) -> StepOutput:
        return output_of([self._next(id) for id in list(self.jobs)])

    def _next(self, id: int) -> Added:
        if not self.script[id]:
            del self.jobs[id]
            return Added(id, [], [], "length")  # its context has no room for a single token
        token = self.script[id].pop(0)
        finish = "stop" if token == END else "" if self.script[id] else "length"
        if finish:
            del self.jobs[id]
        return Added(id, [token], [-0.5], finish)

    def withdraw(self, ids):
        return [self.jobs.pop(id) for id in ids if id in self.jobs]

    def forget(self, ids):
        self.forgotten += ids

    def load_weights(self, version, tensors, keep_kv=False):
        self.version = version

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.jobs), 0)

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


class Slow:
    """A judge that answers when it is told to."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.ready: list[tuple[Key, Answer]] = []
        self.final = False

    def ask(self, key, row, transcript):
        self.keys.append(key)
        return self.final

    def answer(self, answer: Answer) -> None:
        self.ready.append((self.keys.pop(0), answer))

    def poll(self, timeout_s: float = 0.0):
        ready, self.ready = self.ready, []
        return ready

    def close(self):
        pass


def episode(prefix: tuple[Segment, ...] = (), trajectory: int = 8, attempt: int = 1) -> Episode:
    return Episode(Request(trajectory, attempt, 2, ROW.id, 3, resume=bool(prefix)), ROW, prefix, version=3)


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
    assert outcome.episode.take_growth() == (Segment.of(3, (10, 11, END), (-0.5, -0.5, -0.5)),)
    meta = outcome.episode.meta(1.0)
    assert (meta.tokens, meta.oldest, meta.newest) == (3, 3, 3)
    assert engine.forgotten == [8]


def test_what_a_tool_says_is_inserted_and_not_the_policys():
    engine, judge = Scripted((10, END), (12, END)), Verdicts(Observed("70 71"), Scored(0.0))
    runner = Runner(engine, judge, LANGUAGE, 20)
    runner.add(episode())
    [outcome] = play(runner)
    growth = outcome.episode.take_growth()
    assert [(one.version, one.ids.tolist()) for one in growth] == [(3, [10, END]), (None, [70, 71]), (3, [12, END])]
    assert engine.seen[1] == [1, 2, 3, 10, END, 70, 71]
    said = (Turn("policy", f"10 {END}"), Turn("environment", "seen 70 71"), Turn("policy", f"12 {END}"))
    assert judge.asked[-1][1] == said
    assert outcome.episode.meta().tokens == 6


def test_an_episode_goes_on_from_any_prefix():
    whole = (Segment.of(2, (10, END), (-1.0, -1.0)), Segment.of(None, (70,)), Segment.of(3, (12, END), (-1.0, -1.0)))
    for cut in range(3):
        engine = Scripted((12, END)) if cut == 2 else Scripted((10, END), (12, END))
        answers = [Observed("70"), Scored(1.0)] if cut < 2 else [Scored(1.0)]
        runner = Runner(engine, Verdicts(*answers), LANGUAGE, 20)
        if cut == 1:  # the turn was over, but its judgement was lost with the replica
            engine.turns = [(12, END)]
        runner.add(episode(whole[:cut]))
        [outcome] = play(runner)
        assert outcome.episode.tokens == id_bytes([1, 2, 3, 10, END, 70, 12, END])
        assert outcome.reward == 1.0


def test_versions_in_the_middle_of_a_turn_are_kept_apart():
    engine = Scripted((10, 11, END))
    runner = Runner(engine, Verdicts(Scored(1.0)), LANGUAGE, 20)
    one = episode()
    runner.add(one)
    runner.step()
    engine.load_weights(4, {})
    play(runner)
    assert [(part.version, part.ids.tolist()) for part in one.take_growth()] == [(3, [10]), (4, [11, END])]
    assert (one.meta().oldest, one.meta().newest) == (3, 4)


def test_an_answer_to_an_assignment_that_is_gone_is_ignored():
    judge = Slow()
    runner = Runner(Scripted((END,), (END,)), judge, LANGUAGE, 20)
    runner.add(episode(attempt=1))
    runner.step()
    assert [one.key for one in runner.withdraw([8])] == [(8, 1)]
    runner.add(episode(attempt=2))
    runner.step()
    judge.answer(Scored(1.0))
    judge.answer(Scored(0.0))
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


def test_tokens_run_out_in_a_turn():
    runner = Runner(Scripted((10, 11)), Verdicts(Scored(0.0)), LANGUAGE, 2)
    runner.add(episode())
    assert play(runner)[0].episode.finish == "length"


@pytest.mark.parametrize("limit", [6, 5, 4, 3, 2])
def test_a_result_that_leaves_no_room_is_cut_and_the_episode_is_scored(limit):
    judge = Verdicts(Observed("70 71 72"), Scored(-1.0))
    runner = Runner(Scripted((10, END), (12,)), judge, LANGUAGE, limit)
    runner.add(episode())
    [outcome] = play(runner)
    whole = [10, END, 70, 71, 72, 12]
    assert (outcome.episode.finish, outcome.reward) == ("length", -1.0)
    assert outcome.episode.tokens == ROW.tokens + id_bytes(whole[:limit])
    seen = {2: "", 3: "seen 70", 4: "seen 70 71"}.get(limit, "seen 70 71 72")
    last = [Turn("policy", "12")] if limit == 6 else []
    assert list(judge.asked[-1][1]) == [Turn("policy", f"10 {END}"), Turn("environment", seen), *last]


def test_a_prefix_without_room_for_more_is_scored_where_it_ends():
    said, seen = Segment.of(3, (10, END), (-1.0, -1.0)), Segment.of(None, (70, 71))
    for prefix, answers in (((said, seen), [Scored(-1.0)]), ((said,), [Observed("70"), Scored(-1.0)])):
        judge = Verdicts(*answers)
        runner = Runner(Scripted(), judge, LANGUAGE, 4 if seen in prefix else 2)
        runner.add(episode(prefix))
        [outcome] = play(runner)
        assert (outcome.episode.finish, outcome.reward) == ("length", -1.0)
        assert judge.asked[-1][1][-1].role == "environment", "so that it is known to be over"


def test_an_engine_without_room_for_a_token_ends_the_episode_and_does_not_say_that_the_policy_was_silent():
    engine, judge = Scripted((10, END), ()), Verdicts(Observed("70"), Scored(0.5))
    runner = Runner(engine, judge, LANGUAGE, 20)
    runner.add(episode())
    assert [(one.reward, one.episode.finish) for one in play(runner)] == [(0.5, "length")]
    assert [turn.role for turn in judge.asked[-1][1]] == ["policy", "environment"]


def test_whose_judge_takes_long_is_told_once_and_so_is_who_goes_on_after_that():
    now = [0.0]
    judge = Slow()
    runner = Runner(Scripted((10, END), (12, END)), judge, LANGUAGE, 20, lambda: now[0])
    runner.add(episode())
    runner.step()
    runner.step()
    now[0] = 0.2
    assert runner.take_started(0.25) == (), "a quick judge costs no word"
    now[0] = 0.3
    assert runner.take_started(0.25) == (JudgedTurn(8, 1, 0),)
    assert (runner.take_started(0.25), runner.take_resumed(), runner.unfinished()) == ((), (), [8])
    judge.answer(Observed("70"))
    runner.step()
    assert (runner.take_resumed(), runner.take_resumed()) == ((JudgedTurn(8, 1, 1),), ())
    judge.final = True
    while runner.busy:
        runner.step()
    now[0] = 1.0
    assert (runner.take_started(0.25), runner.unfinished()) == ((JudgedTurn(8, 1, 1, final=True),), [])
    judge.answer(Scored(1.0))
    assert [one.reward for one in runner.step()] == [1.0]


def test_what_leaves_while_its_judge_takes_long_is_told_no_more():
    judge = Slow()
    runner = Runner(Scripted((END,), (END,)), judge, LANGUAGE, 20, lambda: 0.0)
    runner.add(episode())
    runner.step()
    assert len(runner.take_started(0.0)) == 1
    runner.withdraw([8])
    judge.answer(Observed("70"))
    runner.add(episode(attempt=2))
    runner.step()
    assert (runner.take_resumed(), runner.take_started(0.0)) == ((), (JudgedTurn(8, 2, 0),))


def test_no_room_for_an_observation_is_another_wait_for_the_judge_and_no_generation():
    judge = Slow()
    runner = Runner(Scripted((10, END)), judge, LANGUAGE, 2, lambda: 0.0)
    runner.add(episode())
    runner.step()
    runner.step()
    assert runner.take_started(0.0) == (JudgedTurn(8, 1, 0),)
    judge.answer(Observed("70"))
    runner.step()
    assert (runner.take_resumed(), runner.take_started(0.0)) == ((), (JudgedTurn(8, 1, 1, final=True),))


def test_the_judge_of_an_emulated_engine_takes_the_time_that_a_simulation_would():
    now = [0.0]
    judge = CoinJudge(3, 2.0, lambda: now[0])
    assert judge.ask((8, 1), ROW, ())
    now[0] = 1.9
    assert judge.poll() == []
    now[0] = 2.0
    assert [key for key, _ in judge.poll()] == [(8, 1)]
    assert judge.poll() == []


def test_a_task_that_will_not_score_an_episode_without_tokens_is_an_error_and_no_reward():
    runner = Runner(Scripted((10, END)), Verdicts(Observed("70 71 72"), Observed("73")), LANGUAGE, 4)
    runner.add(episode())
    [outcome] = play(runner)
    assert outcome.reward is None
    assert "give the task a method score" in outcome.reason


def test_growth_is_handed_out_once_in_runs_of_one_origin():
    one = episode((Segment.of(1, (5,), (-5.0,)),))
    for version, token in ((1, 6), (1, 7)):
        one.sampled(version, id_bytes([token]), np.float32(-token).tobytes())
    assert one.unstored_tokens == 2
    assert one.take_growth() == (Segment.of(1, (6, 7), (-6.0, -7.0)),)
    assert (one.unstored_tokens, one.take_growth()) == (0, ())
    one.sampled(1, id_bytes([8]), np.float32(-8).tobytes())
    one.observed(id_bytes([70, 71]))
    one.sampled(1, id_bytes([9]), np.float32(-9).tobytes())
    one.sampled(2, id_bytes([10]), np.float32(-10).tobytes())
    assert one.take_growth() == (
        Segment.of(1, (8,), (-8.0,)),
        Segment.of(None, (70, 71)),
        Segment.of(1, (9,), (-9.0,)),
        Segment.of(2, (10,), (-10.0,)),
    )
    assert one.last_turn().tolist() == [9, 10]
    assert (one.meta().tokens, one.meta().oldest, one.meta().newest) == (8, 1, 2)


def test_an_evaluation_has_the_mean_reward_beside_the_share_of_right_answers():
    """For rewards that are not 0 or 1 the share alone says little."""
    scores = [PromptScore() for _ in REWARDS]
    for score, reward in zip(scores, REWARDS, strict=True):
        score.add(reward, tokens=3)
    found = summed_up("held_out", scores, 1)
    assert (found.prompts, found.failed, found.mean_tokens) == (5, 1, 3.0)
    assert found.accuracy == 2 / 5  # 0.5 itself is not above it, and who has no verdict is not right
    assert found.mean_reward == pytest.approx((0.5 + 0.6 + 3.0 - 1.0) / 4)


def test_what_an_accuracy_is_stands_beside_it(tmp_path, monkeypatch, capsys):
    found = EvalResult("held_out", 9, 1, 0.25, {1: 0.25}, -1.5, 10.0, 0.0, 2)
    monkeypatch.setattr(models, "Journal", lambda _: SimpleNamespace(config=Config(), meta={}))
    monkeypatch.setattr(models, "weights_of", lambda *_: tmp_path / "step-00000003")
    monkeypatch.setattr(models, "measure", lambda *_: Evaluated(9, 9, (found,)))
    assert models.evaluate(tmp_path, None) == 0
    said = "accuracy 0.250 (share of rewards above 0.5), mean reward -1.500, on 9 held-out prompts, 2 without a verdict"
    assert capsys.readouterr().out == f"step-00000003: {said}\n"
