"""Costs and work of a recorded run, fitted; and that a simulation with them is of this machine, cores and all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from buffers import job_of
from tailrace.config import Config, ConfigError, load, with_values
from tailrace.config.tree import Costs, Workload
from tailrace.engines.emulated import EmulatedEngine
from tailrace.lengths import LengthLaw
from tailrace.protocol import (
    SCORING_S,
    Finished,
    JudgedTurn,
    PromptsAdded,
    ReplicaJoined,
    ScoringStarted,
    TrajectoryMeta,
)
from tailrace.sim.cost_model import check_fit
from tailrace.sim.fit import fit, fitted, fragment
from tailrace.sim.journal_statistics import FitError
from tailrace.sim.simulation import Simulation
from tailrace.store.journal import CARDS
from tailrace.store.run import RunStore
from tailrace.types import Prompt

GROUP = 4
TRUE = Costs(
    decode_step=2e-3,
    decode_sequence=3e-4,
    decode_kv_token=1e-6,
    prefill_token=2e-5,
    train_mini_batch=0.1,
    train_token=5e-4,
    publish=0.02,
    load=0.25,
    kv_tokens=3000,
)


def settings(**values: object) -> Config:
    base = {
        **{f"costs.{name}": getattr(TRUE, name) for name in TRUE.__struct_fields__},
        "workload.group_size": GROUP,
        "workload.prompts_per_step": 8,
        "workload.prompt_tokens": 20,
        "workload.max_completion_tokens": 400,
        "workload.lengths.median": 60,
        "workload.lengths.sigma": 0.8,
        "run.steps": 6,
    }
    return with_values(Config(), base | {name.replace("__", "."): value for name, value in values.items()})


class Recorder:
    """A run folder as a real run leaves it, with what an emulated engine and a trainer of known costs would measure."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config, self.now = folder, config, 0.0
        self.store = RunStore.create(folder, config)
        self.store.record(0.0, ReplicaJoined(0, 1, 0, -1, 3000, 16), [])

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def generate(self, groups: int, processor_share: float = 0.0) -> None:
        """One life of a replica: groups come one by one, a heartbeat follows each second or so."""
        engine = EmulatedEngine(self.config, 0, lambda: self.now, self._sleep)
        engine.load_weights(0, {})
        told = self.now
        for group in range(groups):
            for id in range(GROUP * group, GROUP * group + GROUP):
                engine.submit(job_of(id, group, range(20), 20, 400))
            while engine.stats().waiting + engine.stats().running > 3 * (group % 7):
                engine.step()
                if self.now - told > 0.5:
                    told = self.now
                    self._heartbeat(engine, processor_share)

    def _heartbeat(self, engine: EmulatedEngine, processor_share: float) -> None:
        sums = engine.counters()
        sums |= {"cpu_s": processor_share * sums["busy_s"]}
        self.store.metrics.measure(self.now, -1, "r0", {f"engine/{name}": value for name, value in sums.items()})

    def train(self, parts: int) -> None:
        for part in range(parts):
            tokens, self.now = 1000.0 + 300 * part, self.now + 1
            seconds = TRUE.train_mini_batch + TRUE.train_token * tokens
            values = {"trainer/tokens": tokens, "trainer/seconds": seconds, "trainer/cpu_s": seconds / 2}
            self.store.metrics.measure(self.now, part // 4, "trainer", values)
        self.store.metrics.measure(self.now, 0, "trainer", {"publish/stall_s": 0.01})
        self.store.metrics.measure(self.now, 1, "trainer", {"publish/stall_s": 0.01})
        self.store.metrics.measure(self.now, 1, "trainer", {"checkpoint/stall_s": 0.02})

    def finish(self, groups: int, scored_s: float = 0.0) -> None:
        law = LengthLaw(self.config.workload, 0)
        self.store.record(0.0, PromptsAdded(0, (Prompt(0, 15), Prompt(1, 25))), [])
        for group in range(groups):
            for place, tokens in enumerate(law.group(group, GROUP)):
                meta = TrajectoryMeta(group * GROUP + place, 1, tokens, 0, 0, "stop")
                if scored_s and place % 2:  # the others were scored too quickly to be in the journal
                    turn = JudgedTurn(meta.id, meta.attempt, 0, final=True)
                    self.store.record(1.0, ScoringStarted(0, 1, (turn,)), [])
                self.store.record(1.0 + scored_s, Finished(0, meta), [])
        self.store.close(complete=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recorder = Recorder(tmp_path / "run", settings())
    recorder.generate(60)
    recorder.generate(40)  # started again: its sums begin at nothing
    recorder.train(12)
    recorder.finish(400)
    return recorder.folder


def test_the_costs_of_a_run_are_found_again(run: Path) -> None:
    found = fit(run)
    for name in Costs.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name


def test_how_long_samples_were_scored_is_found_again(tmp_path: Path) -> None:
    for name, scored_s in (("slow", 4.0), ("quick", 0.0)):
        recorder = Recorder(tmp_path / name, settings())
        recorder.generate(60)
        recorder.train(8)
        recorder.finish(10, scored_s)
        mean = (scored_s + SCORING_S) / 2 if scored_s else 0.0
        assert fitted(recorder.folder)["workload.reward_s"] == pytest.approx(mean)


def test_where_processors_did_the_work_their_seconds_are_its_cost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", settings())
    recorder.generate(60, processor_share=0.5)  # a machine so crowded that everything took twice as long
    recorder.train(8)
    recorder.finish(10)
    found = fitted(recorder.folder)
    assert found["costs.decode_step"] == pytest.approx(TRUE.decode_step / 2, rel=1e-3)
    assert found["costs.train_token"] == pytest.approx(TRUE.train_token / 2, rel=1e-3)
    assert found["local.cores"] > 0


def test_where_gpus_did_the_work_the_clock_has_its_cost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", settings())
    recorder.store.meta.set(CARDS, '[{"total":1}]')
    recorder.generate(60, processor_share=0.9)  # the process looks again and again whether its card is done
    recorder.train(8)
    recorder.finish(10)
    found = fitted(recorder.folder)
    assert found["costs.decode_step"] == pytest.approx(TRUE.decode_step, rel=1e-3)
    assert found["costs.train_token"] == pytest.approx(TRUE.train_token, rel=1e-3)
    assert found["local.cores"] == 0


def test_no_cost_is_negative_when_the_kinds_of_work_cannot_be_told_apart(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", settings())
    for beat in range(12):
        late = 0.3 if beat % 2 else 0.0
        values = {"busy_s": beat + late, "steps": 100 * beat, "decoded": 400 * beat, "kv_read": 4e4 * beat}
        values |= {"prefilled": 50 * beat, "load_s": 0.0, "loads": 0}
        store.metrics.measure(beat, -1, "r0", {f"engine/{name}": float(value) for name, value in values.items()})
    store.metrics.measure(1.0, 0, "trainer", {"trainer/tokens": 500.0, "trainer/seconds": 2.0})
    store.record(0.0, Finished(0, TrajectoryMeta(0, 1, 50, 0, 0)), [])
    store.close(complete=True)
    found = fit(tmp_path / "run")
    second = 100 * found.decode_step + 400 * found.decode_sequence + 4e4 * found.decode_kv_token
    assert second + 50 * found.prefill_token == pytest.approx(1.0, rel=0.1)
    assert found.train_token * 500 + found.train_mini_batch == pytest.approx(2.0)
    assert min(getattr(found, name) for name in Costs.__struct_fields__) >= 0


def test_the_likeness_of_the_samples_of_a_prompt_is_found_again(run: Path) -> None:
    lengths = with_values(Config(), fitted(run)).workload.lengths
    assert lengths.correlation == pytest.approx(0.5, abs=0.08)
    again = LengthLaw(msgspec.structs.replace(Workload(), max_completion_tokens=400, lengths=lengths), 0)
    assert again.mean == pytest.approx(LengthLaw(settings().workload, 0).mean, rel=0.05)


def test_the_fragment_goes_after_any_settings_and_can_be_simulated(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "[workload]\nprompts_per_step = 8\ngroup_size = 4\nmax_completion_tokens = 400\n"
        '[workload.lengths]\nlaw = "mixture"\nmedian = 900\nsigma = 0.3\ntail_share = 0.1\ntail_alpha = 2.0\n'
        "drift_per_step = 0.1\n[local]\nreplicas = 3\nrelays = 2\n"
    )
    (tmp_path / "fit.toml").write_text(fragment(run))
    config = load([tmp_path / "mine.toml", tmp_path / "fit.toml"], ["--run.steps", "4"])
    assert config.costs == fit(run)
    assert config.workload.lengths == with_values(Config(), fitted(run)).workload.lengths
    assert (config.workload.prompt_tokens, config.rollout.roofline_batch, config.local.cores) == (20, 16, 0)
    check_fit(config)
    simulation = Simulation(config)
    result = simulation.run()
    assert [replica.host for replica in simulation.fleet.replicas] == [0, 1, 0]
    assert result.tokens_per_s > 0
    assert result.dollars_per_million_tokens == 0


@pytest.mark.parametrize("generated", [True, False])
def test_a_run_that_says_too_little_is_refused(tmp_path: Path, generated: bool) -> None:
    recorder = Recorder(tmp_path / "run", settings())
    if generated:
        recorder.generate(40)
    recorder.finish(2)
    with pytest.raises(FitError, match="trained nothing" if generated else "too few"):
        fit(recorder.folder)


# --------------------------------------------------------------------------------------------------------- simulation


def test_a_simulated_engine_is_as_fast_as_an_emulated_one() -> None:
    """One replica, on-policy, training for nothing: the run is the sum of its rounds."""
    config = settings(local__replicas=1, schedule__kind="sync", costs__train_mini_batch=0, costs__train_token=0)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    engine = EmulatedEngine(config, config.run.seed, lambda: now, sleep)
    for step in range(config.run.steps):
        for group in range(8 * step, 8 * step + 8):
            for id in range(GROUP * group, GROUP * group + GROUP):
                engine.submit(job_of(id, group, range(20), 20, 400))
        engine.load_weights(step, {})
        while engine.stats().waiting + engine.stats().running:
            engine.step()
    assert Simulation(config).run().virtual_s == pytest.approx(now, rel=0.03)


def test_busy_processes_share_the_cores_there_are() -> None:
    seconds = {
        (kind, cores): Simulation(settings(schedule__kind=kind, local__cores=cores, trainer__threads=1)).run().virtual_s
        for kind in ("sync", "trajectory")
        for cores in (0, 1, 3)
    }
    assert seconds["sync", 3] == pytest.approx(seconds["sync", 0])
    assert seconds["trajectory", 3] == pytest.approx(seconds["trajectory", 0])
    assert seconds["sync", 1] > 1.2 * seconds["sync", 0]
    gain = {cores: seconds["sync", cores] / seconds["trajectory", cores] for cores in (1, 3)}
    assert gain[1] < gain[3]  # what overlaps gains nothing where there is one core to share


def test_two_engines_on_one_core_take_twice_as_long() -> None:
    values = {"schedule__kind": "sync", "workload__lengths__law": "fixed", "workload__lengths__sigma": 0}
    free = {f"costs__{name}": 0 for name in ("train_mini_batch", "train_token", "publish", "load")}
    alone, shared = (Simulation(settings(**values, **free, local__cores=cores)).run().virtual_s for cores in (2, 1))
    assert shared == pytest.approx(2 * alone, rel=1e-3)


def test_one_core_does_all_the_work_of_engines_and_trainer_one_second_a_second() -> None:
    free = {f"costs__{name}": 0 for name in ("prefill_token", "decode_kv_token", "publish", "load")}
    config = settings(local__cores=1, trainer__threads=1, schedule__kind="trajectory", run__steps=20, **free)
    simulation = Simulation(config)
    seconds = simulation.run().virtual_s
    engines = [replica.engine for replica in simulation.fleet.replicas]
    decoding = sum(
        TRUE.decode_step * engine.decode_steps + TRUE.decode_sequence * engine.generated for engine in engines
    )
    trained = simulation.meter.fold.total
    training = TRUE.train_mini_batch * trained.mini_batches + TRUE.train_token * trained.tokens
    assert decoding + training == pytest.approx(seconds, rel=1e-3)


def test_more_threads_of_the_trainer_take_fewer_seconds() -> None:
    one, two = (
        Simulation(settings(schedule__kind="sync", local__cores=4, trainer__threads=threads)).run().virtual_s
        for threads in (1, 2)
    )
    assert two < one


def test_what_a_measured_pool_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.kv_tokens = 420"):
        check_fit(settings(costs__kv_tokens=300))
    with pytest.raises(ConfigError, match=r"split\.colocated"):
        check_fit(settings(split__colocated=True))
