"""The emulated engine and learner: their time is the model's, their tokens are the trajectory's. The clock is ours."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from buffers import Added, added, ids_of, job_of
from tailrace.config import Config, ConfigError, with_values
from tailrace.engines.base import Job
from tailrace.engines.emulated import CATCH_UP_S, SLICE_S, EmulatedEngine
from tailrace.lengths import LengthLaw
from tailrace.trainer.emulated import EmulatedLearner, EmulatedState
from tailrace.trainer.reader import in_memory
from tailrace.types import Segment, Trajectory
from tailrace.wire.messages import ComponentSpec

GROUP = 4
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


class Time:
    """A clock that moves only when somebody sleeps, or when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def settings(**values: object) -> Config:
    base = {
        "costs.decode_step": 1e-3,
        "costs.decode_sequence": 1e-4,
        "costs.prefill_token": 1e-5,
        "costs.load": 0.5,
        "rollout.kv_tokens": 4000,
        "workload.group_size": GROUP,
        "workload.prompts_per_step": 8,
        "workload.max_completion_tokens": 500,
        "workload.lengths.median": 40,
        "workload.lengths.sigma": 1.0,
    }
    return with_values(Config(), base | {name.replace("__", "."): value for name, value in values.items()})


def engine_of(config: Config, time: Time, seed: int = 3) -> EmulatedEngine:
    return EmulatedEngine(config, seed, lambda: time.now, time.sleep)


def job(id: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 500) -> Job:
    return job_of(id, id // GROUP, prompt, len(prompt), max_tokens)


def drawn(config: Config, id: int, seed: int = 3) -> int:
    return LengthLaw(config.workload, seed).group(id // GROUP, GROUP)[id % GROUP]


def finish(engine: EmulatedEngine) -> dict[int, list[Added]]:
    """Step until nothing is left; what came, by trajectory."""
    seen: dict[int, list[Added]] = {}
    for _ in range(100_000):
        stats = engine.stats()
        if not stats.running and not stats.waiting:
            return seen
        for sampled in added(engine.step()):
            seen.setdefault(sampled.id, []).append(sampled)
    raise AssertionError("the engine does not come to an end")


def tokens_of(parts: list[Added]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part.tokens)


def test_every_trajectory_gets_the_length_that_the_simulator_draws() -> None:
    config, time = settings(), Time()
    engine = engine_of(config, time)
    for id in range(12):
        engine.submit(job(id))
    seen = finish(engine)
    assert {id: len(tokens_of(parts)) for id, parts in seen.items()} == {id: drawn(config, id) for id in range(12)}
    assert all(parts[-1].finish == "stop" and not any(p.finish for p in parts[:-1]) for parts in seen.values())
    assert all(len(part.tokens) == len(part.logprobs) for parts in seen.values() for part in parts)


def test_one_sequence_takes_exactly_the_modelled_time() -> None:
    config, time = settings(costs__decode_kv_token=1e-6), Time()
    engine = engine_of(config, time)
    engine.submit(job(0))
    finish(engine)
    steps = drawn(config, 0)
    kv_read = sum(len(PROMPT) + step for step in range(steps))
    assert time.now - 100.0 == pytest.approx(1e-5 * len(PROMPT) + steps * 1.1e-3 + 1e-6 * kv_read)
    assert engine.counters() == {
        "busy_s": pytest.approx(time.now - 100.0),
        "steps": steps,
        "decoded": steps,
        "kv_read": kv_read,
        "prefilled": len(PROMPT),
        "load_s": 0.0,
        "loads": 0,
    }


def test_time_that_python_takes_between_steps_is_made_good() -> None:
    whole_slices = 22 * int(SLICE_S / 1.1e-3)
    config = settings(
        workload__lengths__law="fixed", workload__lengths__median=whole_slices, workload__lengths__sigma=0
    )
    quick, slow = Time(), Time()
    for time, overhead in ((quick, 0.0), (slow, SLICE_S / 2)):
        engine = engine_of(config, time)
        engine.submit(job(0))
        while engine.stats().running + engine.stats().waiting:
            engine.step()
            time.now += overhead
    assert slow.now == pytest.approx(quick.now + SLICE_S / 2)  # only what comes after the last step is lost


def test_a_long_stop_is_not_made_good_by_a_burst() -> None:
    config = settings(workload__lengths__law="fixed", workload__lengths__median=400, workload__lengths__sigma=0)
    time = Time()
    engine = engine_of(config, time)
    engine.submit(job(0))
    engine.step()
    time.now += 60.0  # stopped by a signal
    finish(engine)
    worked = time.now - 160.0
    assert worked == pytest.approx(engine.counters()["busy_s"] - CATCH_UP_S, abs=2 * SLICE_S)


def test_rest_between_two_pieces_of_work_is_not_caught_up() -> None:
    config, time = settings(), Time()
    engine = engine_of(config, time)
    engine.submit(job(0))
    finish(engine)
    time.now += 0.1
    before = time.now
    engine.submit(job(1))
    finish(engine)
    assert time.now - before == pytest.approx(1e-5 * len(PROMPT) + 1.1e-3 * drawn(config, 1))


def test_a_call_covers_a_slice_of_time_and_stops_at_the_next_completion() -> None:
    config, time = settings(), Time()
    engine = engine_of(config, time)
    for id in range(GROUP):
        engine.submit(job(id))
    shortest = min(drawn(config, id) for id in range(GROUP))
    steps, finished = [], False
    while not finished:
        batch = added(engine.step())
        steps.append(len(batch[0].tokens))
        finished = any(sampled.finish for sampled in batch)
    assert sum(steps) == shortest
    assert all(count * (1e-3 + GROUP * 1e-4) <= SLICE_S for count in steps)


def test_a_step_longer_than_a_slice_is_one_step() -> None:
    engine = engine_of(settings(costs__decode_step=10 * SLICE_S), Time())
    engine.submit(job(0))
    assert len(engine.step().tokens) == 1


def test_a_moved_trajectory_has_the_tokens_of_one_that_stayed() -> None:
    config = settings()
    longest = max(range(16), key=lambda id: drawn(config, id))
    stayed = engine_of(config, Time())
    stayed.submit(job(longest))
    expected = tokens_of(finish(stayed)[longest])
    moving, got = job(longest), ()
    while True:
        engine = engine_of(config, Time())
        engine.submit(moving)
        (sampled,) = added(engine.step())
        got += tuple(sampled.tokens)
        if sampled.finish:
            break
        (moving,) = engine.withdraw([longest, 999])
        assert tuple(ids_of(moving)) == PROMPT + got
        assert moving.max_tokens == 500 - len(got)
        assert engine.stats().kv_tokens == 0
    assert got == expected


def test_a_trajectory_that_was_complete_before_it_came_gets_no_more_tokens() -> None:
    """Whoever had it was lost before it was scored."""
    config = settings()
    engine = engine_of(config, Time())
    engine.submit(job(0))
    complete = job(0, PROMPT + tokens_of(finish(engine)[0]))
    complete = msgspec.structs.replace(complete, prompt_tokens=len(PROMPT))
    other = engine_of(config, Time())
    other.submit(complete)
    assert added(other.step()) == [(0, [], [], "stop")]
    other.submit(complete)
    assert other.withdraw([0]) == added(other.step()) == []


def test_a_trajectory_that_failed_has_other_tokens_and_another_length_as_often_as_it_is_moved() -> None:
    config = settings()
    for id in range(8):
        attempts = []
        for failures in range(3):
            moving, got = msgspec.structs.replace(job(id), failures=failures), ()
            while True:
                engine = engine_of(config, Time())
                engine.submit(moving)
                (sampled,) = added(engine.step())
                got += tuple(sampled.tokens)
                if sampled.finish:
                    break
                (moving,) = engine.withdraw([id])
                assert moving.failures == failures
            attempts.append(got)
        assert len(attempts[0]) == drawn(config, id)
        assert len({len(got) for got in attempts}) == 3
        assert len({got[:20] for got in attempts if len(got) >= 20}) == sum(len(got) >= 20 for got in attempts)


def test_the_limit_of_tokens_ends_a_turn_and_the_next_goes_on_from_its_kv() -> None:
    config = settings()
    long = max(range(16), key=lambda id: drawn(config, id))
    engine = engine_of(config, Time())
    engine.submit(job(long, max_tokens=7))
    parts = finish(engine)[long]
    assert parts[-1].finish == "length"
    assert len(tokens_of(parts)) == 7
    read = engine.counters()["prefilled"]
    engine.submit(job(long, PROMPT + tokens_of(parts) + (33, 34)))
    finish(engine)
    assert engine.counters()["prefilled"] - read == 2


def test_samples_of_a_group_share_their_prompt() -> None:
    engine = engine_of(settings(costs__prefill_token=0), Time())
    engine.submit(job(0))
    engine.submit(job(1))
    engine.submit(job(GROUP))
    sampled = engine.step().tokens
    assert engine.stats().kv_tokens == 2 * len(PROMPT) + len(sampled)


def test_work_waits_when_the_pool_is_full_the_youngest_goes_back_and_all_of_it_ends() -> None:
    config = settings(rollout__kv_tokens=600, workload__lengths__median=150)
    engine = engine_of(config, Time())
    for id in range(12):
        engine.submit(job(id))
    seen: dict[int, list[Added]] = {}
    went_back = False
    before = 12
    while engine.stats().running + engine.stats().waiting:
        for sampled in added(engine.step()):
            seen.setdefault(sampled.id, []).append(sampled)
        stats = engine.stats()
        went_back |= stats.waiting > before
        before = stats.waiting
        assert stats.kv_tokens <= 600
    assert went_back
    assert {id: len(tokens_of(parts)) for id, parts in seen.items()} == {id: drawn(config, id) for id in range(12)}
    assert engine.stats().kv_tokens == 0


def test_a_sequence_alone_in_a_full_pool_has_used_up_its_context() -> None:
    config = settings(rollout__kv_tokens=60, workload__lengths__median=400)
    long = max(range(16), key=lambda id: drawn(config, id))
    engine = engine_of(config, Time())
    engine.submit(job(long))
    parts = finish(engine)[long]
    assert parts[-1].finish == "length"
    assert len(tokens_of(parts)) == 50


@pytest.mark.parametrize("keep", [False, True])
def test_new_weights_take_their_time_and_running_work_is_read_again_unless_kv_is_kept(keep: bool) -> None:
    config, time = settings(), Time()
    engine = engine_of(config, time)
    engine.submit(job(0))
    (first,) = added(engine.step())
    before, read = time.now, engine.counters()["prefilled"]
    engine.load_weights(5, {}, keep_kv=keep)
    assert engine.version == 5
    assert time.now == pytest.approx(before + 0.5)
    rest = finish(engine)[0]
    assert len(first.tokens) + len(tokens_of(rest)) == drawn(config, 0)
    assert engine.counters()["prefilled"] - read == (0 if keep else len(PROMPT) + len(first.tokens))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"costs__decode_step": 0, "costs__decode_sequence": 0, "model__preset": "qwen2.5-7b"}, "costs.decode_step"),
        ({"workload__lengths__drift_per_step": 0.1}, "drift_per_step"),
    ],
)
def test_what_cannot_be_emulated_is_refused(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        engine_of(settings(**values), Time())


def test_where_links_matter_each_version_moves_one_element_in_a_hundred() -> None:
    learner, versions = EmulatedLearner(settings(costs__weight_mbytes=0.004)), list[np.ndarray]()
    for step in range(202):
        learner.state = EmulatedState(step)
        versions.append(learner.snapshot()["emulated.more"].view(np.uint32))
    assert [np.count_nonzero(a != b) for a, b in pairwise(versions)] == [10] * 201
    assert np.all((versions[200] - versions[0]) >> 16 == 2)


def test_the_learner_takes_time_by_tokens_and_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    config, time = settings(costs__train_mini_batch=0.5, costs__train_token=1e-3, costs__publish=0.25), Time()
    learner = EmulatedLearner(config, sleep=time.sleep, clock=lambda: time.now)
    assert learner.restore(tmp_path) == 0
    answer = Segment.of(0, tuple(range(90)), (0.0,) * 90)
    groups = [[Trajectory(id, 0, 0, (Segment.of(None, PROMPT), answer), reward=float(id)) for id in range(2)]]
    measured = learner.train_mini_batch(6, 0, *in_memory(groups))
    assert time.now - 100.0 == pytest.approx(0.5 + 0.2)
    own = {"reward": 0.5, "reward_std": 0.5, "tokens": 180, "sequences": 2}
    assert measured == own | {"seconds": pytest.approx(0.7)}  # named as by a learner with a model
    assert np.all(learner.snapshot()["emulated.weight"] == 7)
    assert time.now - 100.0 == pytest.approx(0.95)
    learner.save(tmp_path)
    assert EmulatedLearner(config).restore(tmp_path) == 7
    learner.train_mini_batch(7, 0, *in_memory(groups))
    learner.save(tmp_path)
    newest = tmp_path / "state.json"
    newest.write_bytes(newest.read_bytes().replace(b'"step":8', b'"step":2'))
    assert EmulatedLearner(config).restore(tmp_path) == 7, "the newest was changed: the one before it counts"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Segment.of(0, (1, 2), (-1.0, float("nan"))), "t1 has log-probs that are not finite"),
        (Segment.of(0, (1, 2), (-1.0,)), "t1 has sampled tokens without the log-probs"),
    ],
)
def test_the_learner_reads_and_checks_what_it_would_train_on(answer: Segment, reason: str) -> None:
    learner, prompt = EmulatedLearner(settings(), sleep=lambda _: None), Segment.of(None, PROMPT)
    good = Trajectory(0, 0, 0, (prompt, Segment.of(0, (1,), (-1.0,))), reward=1.0)
    with pytest.raises(ValueError, match=reason):
        learner.train_mini_batch(0, 0, *in_memory([[good, Trajectory(1, 0, 0, (prompt, answer), reward=0.0)]]))
    same = Trajectory(1, 0, 0, (prompt, answer), reward=1.0)
    assert learner.train_mini_batch(0, 0, *in_memory([[good, same]]))["sequences"] == 2, (
        "without advantage it is not read"
    )


def test_an_emulated_trainer_publishes_without_torch(tmp_path: Path) -> None:
    spec = ComponentSpec("trainer", 0, 1, "", "token", str(tmp_path), settings(trainer__engine="emulated"))
    program = (
        "import sys, msgspec; from tailrace.trainer import worker; from tailrace.wire.messages import ComponentSpec;"
        "group = worker.build_rank_group(msgspec.json.decode(sys.argv[1], type=ComponentSpec));"
        "print(group.snapshot(1) > 0, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, msgspec.json.encode(spec).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]
