"""Published figures, and how each is described to the simulator: the rows of `published.py`.

Every row is simulated with the presets of `examples/clusters/` and the one set of constants in `[efficiency]`. No row
has a constant of its own. What a source leaves open is assumed once per workload, listed in `ASSUMED`, and the same for
every schedule that is compared; what a source states of one system only (verl's async runs recompute no log-probs,
systems without relays update by a collective) is listed there too. Speed-ups are ratios of trained tokens per second,
or of tokens per second and GPU where a source compares clusters of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from tailrace.config import load, with_values
from tailrace.config.tree import Config
from tailrace.sim.cost_model import CostModel
from tailrace.sim.result import Result

ROOT = Path(__file__).parents[1]
STEPS = 5  # that are measured, in the steady state
COLLECTIVE = 8  # GB/s at which systems without relays update all replicas: verl moves 57 GB in 6 to 7 s
FITTED = (
    "AReaL",
    "verl",
    "DORA",
    "NeMo RL v0.4",
    "NeMo RL v0.5",
)  # the sources that constants were fitted to (`published_fit.py`)

SOURCES = """\
- Laminar: arXiv 2510.12633. AReaL: arXiv 2505.24298. DORA: arXiv 2604.26256. LlamaRL: arXiv 2505.24034.
- verl: docs/advance/fully_async.md of volcengine/verl (10/18/2025). verl one-step: docs/advance/one_step_off.md
  (07/17/2025).
- verl 30B-A3B, verl tools: the same page as of 01/29/2026, experiments of 30B and of multi-turn tool calling, with
  grpo_30b_a3b_base_math_megatron_96_32.sh and dapo_7b_async_retool.sh of verl/experimental/fully_async_policy/shell.
- verl's require_batches: `_get_samples_from_queue` of its fully_async_policy/fully_async_trainer.py.
- NeMo RL v0.4, v0.5, v0.6: docs/about/performance-summary.md of NVIDIA-NeMo/RL, tables of DGX-H100 in BF16, and those
  of GB200 of v0.5 and v0.6; recipes in examples/configs/recipes/llm/performance of these versions; its rate of
  weights from pull requests 1379 and 1418; which groups a step waits for, and how many prompts are generated at once:
  `ReplayBuffer.sample` and `AsyncTrajectoryCollector` of nemo_rl/algorithms/async_utils.py; the 128 sequences of its
  asynchronous engines: its pull request 4221, and `get_batch_defaults` of vLLM 0.10, 0.11 and 0.17. Memory of H100
  and GB200: what the driver reports (81,559 and 189,471 MiB).
- verl V1: docs/advance/v1_async_trainer.md of verl-project/verl (08/20/2026), "V1 trainer all modes"; what is begun
  ahead, which prompts are taken first, and over what ranks are balanced: verl/trainer/ppo/v1
  (`trainer_colocate_async.py`, `replay_buffer.py`, `_balance_batch` of `trainer_base.py`); its rate of weights: the
  checkpoint engine with 30B-A3B in docs/advance/fully_async.md. Shape of Qwen3.5-35B-A3B:
  tests/utils/test_flops_counter.py.
- verl MI300X: "verl on AMD: production-ready RL post-training on ROCm" (verl's blog, 08/14/2026; AMD's ROCm blog,
  09/08/2026), and dapo_7b_math_fsdp2_16_16.sh of verl/experimental/fully_async_policy/shell.
- verl 4B: docs/benchmark.md of IanYHWu/verl-may-2026-async, section 1, with _colocate_acemath_40k.sh and
  _async_acemath_40k.sh of its scripts/benchmark. Shape of Qwen3.5-4B: scripts/models/qwen35-4B.sh of redai-infra/Relax.
- LoongSage: docs/en/fully-async-mode.md of baidu-baige/LoongSage, section 5, with
  conf/qwen3_30b_a3b/dapo_h20_1node.yaml and conf/default.yaml.
- NeMo RL DeepSeek V3: the rows of DeepSeek V3 in the same tables of v0.4, v0.5 and v0.6, with the recipes of these
  versions; how long new weights take: its pull requests 1379 (apart) and 1267 (colocated; in a review of 10/18/2025).
- NeMo RL, 0.88 of the memory: its pull request 3278 (after v0.6; 51 to 52 and 57.8 tokens/s per GPU).
- verl's balance of ranks: `_balance_batch` of verl/trainer/ppo/ray_trainer.py before pull request 3605 (10/23/2025);
  since then each rank's samples are put in order of length, so that mini-batches are alike. The asynchronous trainer
  balances what it fetches (`assemble_batch_from_rollout_samples` of fully_async_policy/detach_utils.py).
"""

ASSUMED = """\
- All baselines: weights reach the replicas by a collective of 8 GB/s that stops trainer and replicas, as verl
  documents; only `trajectory` has a relay tier.
- Laminar: GPU counts 7B 32-256, 32B 64-512, 72B 128-1,024; split 3:2 (7B), 5:3 (32B, 72B); tensor parallelism 1
  / 4 / 8; prompts of 200 tokens; lengths log-normal with median 2,000 and p99 of ten times that, cut at 16K;
  two extra forward passes; no staleness bound (16), two steps of work ahead.
- AReaL: lengths with median 7,500 and mean 9,500 (mathematics; implied by published throughput), 11,000 and
  13,000 (code); tensor parallelism 1 / 1 / 4 / 8 in rollout, 1 / 1 / 2 / 2 in training; one extra forward pass.
- verl: lengths with median 460 and mean 900, of its published seconds of training; one extra forward pass when
  colocated, none in async (as its scripts say); 256 sequences in flight per replica of 4 GPUs, and a trainer that
  waits for 128 prompts, four mini-batches, at a time (as its scripts say: require_batches = 4). Samples reach the
  asynchronous trainer through one process: 2.6 ms each, which is the 21 s that it waits at 32 GPUs (fitted to that).
- verl 30B-A3B and verl tools: lengths so that training takes as long as published when colocated (mean 1,560 and 3,795,
  sigma 0.8); batches, ways, memory and packs of its scripts, 16 prompts in flight per replica; 30B: engines without
  CUDA graphs (enforce_eager: True), log-probs of the reference also in async; tools: turns as in laminar_tools_7b, of
  up to 16.
- verl, verl one-step and Laminar: ranks are balanced over a step, not over a mini-batch (verl until October 2025; that
  Laminar's trainer is verl's is assumed). verl 30B-A3B and verl tools are of November 2025 and fetch one mini-batch at
  a time (require_batches = 1): balanced over a mini-batch.
- verl V1: four hosts of eight H100 (the page says H100 of its second table only), 64 x 8 samples (8: from tokens per
  second, seconds and mean length), prompts of 150 tokens; mean lengths as published, sigma 0.8; recomputation of
  activations as in verl's example for this model, one extra forward pass (decoupled PPO), packs of one longest
  sequence. Asynchronous: one batch of prompts begun ahead, all of it at once, oldest prompts first, dropped when older
  than 8 versions; weights at 14 GB/s. Of 40 layers 10 have attention with a KV cache (described as a quarter of the KV
  bytes and of the query heads); the state of the other 30 is left out.
- verl MI300X: as verl at 32 GPUs, but for the card, the mean length (890, as published for its first 260 steps), the
  memory of its script (0.8, asynchronous) and the balance of ranks (over a mini-batch). The published medians.
- verl 4B: lengths with the published mean of 25,000 and 5 % at the cap of 40,960 (sigma 0.31; both are of its runs on
  B200); 16 prompts in flight per replica; one extra forward pass when colocated, none in async, recomputation of
  activations, engines with CUDA graphs, as its scripts say. One parameter sync is four rounds of 32 (30) prompts. Of
  32 layers 8 have attention with a KV cache, described as for verl V1. CPU time of the offloaded optimiser is left out.
- LoongSage: 64 x 8 samples in four mini-batches, lengths so that the colocated step takes as long as published (mean
  7,050, sigma 0.8); parallelism, packs, memory (0.8), CUDA graphs and at most 512 requests at once as its configuration
  says; one extra forward pass. `no-window` with stale_steps = 1; `windowed-fifo` is not one of our schedules, and how
  much its colocated partial rollout samples ahead is not published.
- NeMo RL DeepSeek V3: as NeMo RL; latent attention as a KV cache of 576 elements a layer, of which every way of an
  engine has a copy, and with the arithmetic of 128 heads; new weights in 14 s (96 GB/s), and in 35 s where the engines
  are on the trainer's cards, both as published (on GB200 as on H100).
- verl one-step: 512 x 12 samples, two ways in rollout, four in training (as its scripts say); lengths so that training
  takes as long as published when colocated (FSDP2: median 210, mean 640; Megatron: 350 and 900).
- DORA: split 5:3 (implied by its times), tensor parallelism 4 and 8, median length 1,100 (the mean is
  published), two extra forward passes; its partial rollout shares the GPUs with training (as published).
- LlamaRL: 256 H100 (8B, 70B) and 1,024 H100 (405B), half of them train; 2,048 trajectories a step; answers of 400
  tokens on average, cut at 2,048; the baseline generates with the model parallelism of training (8, 8 and 64), as
  published, so it changes roles without an engine that starts and stops (0 s); its own generator has 1, 4 and, in
  fp8, 8 ways; it begins one step ahead and continues long answers.
- NeMo RL: prompts of 150 tokens; means as published, sigma 0.8, cut at the longest sequence; two extra forward
  passes; weights at 85 GB/s, which is 5.5 s for 235B, as published (the pull request that brought it there is in v0.4
  too: 1418); batches, packs (logprob_batch_size times larger in forward passes), splits and parallelism of its
  recipes, their activation_checkpointing (8B and 235B) and gpu_memory_utilization (0.6; 0.8 asynchronous; 0.4 for
  235B on 64 GB200 of v0.6), and engines with CUDA graphs (enforce_eager: False). What may be one or eight steps old
  begins so many steps ahead and is updated in the middle of running answers (in_flight_weight_updates). A batch of
  prompts belongs to one step, which begins when all of it is there; at most one or eight batches of prompts are
  generated at once, and a prompt holds its place until its last answer has ended. Asynchronous engines decode at most
  128 sequences together (vLLM's default for them; 1,024 for the others). Hosts of GB200 have four cards, and NVLink
  reaches 64.
"""

MISSING = {  # what the model lacks, of rows that are off by more than 35 %
    ("verl", "fully async over colocated, 32 GPUs"): (
        "answers that grow while a run trains, and not alike in both runs. The colocated one takes 494 s a step over "
        "its first 100 steps and 790 in the table; over those 100 steps its own clock says 1.72"
    ),
    ("verl 4B", "fully async over colocated, 6 + 2 H100"): (
        "a pipeline that is still filling. The published figure is the mean of rounds 2 to 4 of one run, which fall "
        "from 1,839 to 1,346 s; with the last of them the ratio is 0.51"
    ),
    ("LlamaRL", "405B"): (
        "generation inside a trainer, without an engine. The baseline takes 636 s where reading the weights with 64 "
        "ways, and all-reduces between eight hosts, give 112; what it does in that time is not published"
    ),
    ("NeMo RL v0.6 GB200", "235B-A22B, per GPU"): (
        "where engines lie. On policy, 64 cards take 286 s a step and 128 take 345: 64 lie within one NVLink domain, "
        "128 do not, and placement by topology came after v0.6 (its pull request 2612). The model has the same links "
        "for both, and what a call between hosts costs from H100: 281 s for the asynchronous run (published 278), but "
        "379 and 318 s on policy"
    ),
}

DIFFERENCES = """\
- Laminar over AReaL: our `partial` refills at once and recomputes KV at full prefill speed; the rest of what the
  paper's baseline pays at an update is not known to us. Its maximum over verl: more work ahead would bring it, at a
  staleness that the paper does not show.
- How much Laminar has under way is assumed (`steps_ahead = 2`). By its own definition of staleness, at a sample's end,
  samples are at most 3 versions old then, and at most 4 with 4, as published for 7B on 64 GPUs. With 4, its means over
  verl, one-step and stream are 8, 7 and 6 % too low and the maximum 15 %; but then the trainer is the limit where
  repack was measured, and repack gains nothing.
- AReaL's interruptible generation (+12 %, +17 %): the variant that drains before every update is not one of our
  schedules. Its hours come out too short: the lengths are assumed.
- Laminar's wait against NCCL (-37 %): compared with the collective of verl's documentation our wait is far
  shorter.
- verl 30B-A3B: on a quarter of the cards an update takes 2.4 times as long, in the model 3.5 times. verl tools: on half
  of them 1.6 times, in the model 1.5 times; and how long a call of its sandbox takes is not published.
- verl 4B: rounds of one short run, which vary by a factor of 1.5. Training takes 1.65 times as long as in the model,
  colocated and apart alike; generation 1.2 times when colocated and 1.7 times apart. Linear attention has a state that
  engines read and write in every decode step: 24 layers of half a million elements per sequence.
- LoongSage: a weight update aborts requests, and groups whose samples are not all there then are dropped (its
  partial_dropped_incomplete_count); the trainer goes back to the old policy's weights for every mini-batch's log-probs.
- verl MI300X: both seconds come out at half of what is published, so the lengths of its first 64 steps were longer, or
  an MI300X reaches less of its memory and arithmetic than an H100 does.
- NeMo RL DeepSeek V3: on-policy steps come out 11 to 31 % too short, asynchronous ones 3 to 19 %.
- LlamaRL: lengths are not published, and they decide how long a synchronous round is.
- NeMo RL, 235B-A22B on policy, H100: what calling the second host costs is fitted to v0.4 and v0.5 (506 and 431 s);
  v0.6 takes 395, and 312 on twice the cards, where the model has 466 and 409.
- GB200, dense models: training comes out 7 % (8B) to a quarter (32B) too fast. Transformer Engine reports the host as a
  limit on Grace (its issue 2053): a linear layer whose product takes 42 us there takes 100.
"""


BALANCED_BY_STEP = ("laminar", "verl")  # presets of systems whose trainer is verl's of before October 2025


class Case(NamedTuple):
    """One simulation: a preset, a schedule and the settings that the source states for this row."""

    preset: str
    schedule: str
    settings: tuple[tuple[str, Any], ...] = ()

    def with_setting(self, key: str, value: Any) -> Case:
        return self._replace(settings=(*self.settings, (key, value)))

    def config(self, constants: dict[str, float] | None = None) -> Config:
        base = load([ROOT / "examples" / "clusters" / f"{self.preset}.toml"])
        weights = {} if self.schedule == "trajectory" else {"cluster.collective_gbytes_per_s": COLLECTIVE}
        balance = {"trainer.balance": "step"} if self.preset.startswith(BALANCED_BY_STEP) else {}
        values = {"schedule.kind": self.schedule, "run.steps": STEPS, **weights, **balance, **dict(self.settings)}
        given = {} if base.efficiency.decoding == "typical" else {"layer_us"}  # how the source's engines decode
        fitted = {f"efficiency.{key}": value for key, value in (constants or {}).items() if key not in given}
        return with_values(base, values | fitted)


class Row(NamedTuple):
    source: str
    figure: str
    published: float
    kind: str  # "speed-up", "absolute" or "other"
    cases: tuple[Case, ...]
    predict: Callable[..., float]

    @property
    def key(self) -> tuple[str, str]:
        return self.source, self.figure

    @property
    def held_out(self) -> bool:
        return self.source not in FITTED


def case(preset: str, schedule: str, **settings: Any) -> Case:
    return Case(preset, schedule, tuple((key.replace("__", "."), value) for key, value in settings.items()))


def speed_up(fast: Result, slow: Result) -> float:
    return fast.tokens_per_s / slow.tokens_per_s


def per_gpu(fast: Result, slow: Result) -> float:
    return speed_up(fast, slow) * slow.gpus / fast.gpus


def step_s(result: Result) -> float:
    return result.step_s


def training_s(result: Result) -> float:
    return result.step_s * (1.0 - result.trainer_idle)


def pair(source: str, figure: str, fast_s: float, slow_s: float, fast: Case, slow: Case) -> list[Row]:
    """A published pair of seconds per step: their ratio, and both."""
    return [
        Row(source, figure, slow_s / fast_s, "speed-up", (fast, slow), speed_up),
        Row(source, f"{figure}: s a step", fast_s, "absolute", (fast,), step_s),
        Row(source, f"{figure}: s a step of the slower", slow_s, "absolute", (slow,), step_s),
    ]


# ---------------------------------------------------------------------------------------------------------- Laminar

SCALES = {
    "laminar_math_7b": (32, 64, 128, 256),
    "laminar_math_32b": (64, 128, 256, 512),
    "laminar_math_72b": (128, 256, 512, 1024),
}
POINTS = [(preset, gpus) for preset, scales in SCALES.items() for gpus in scales]


def laminar(schedule: str) -> tuple[Case, ...]:
    return tuple(case(preset, schedule, cluster__gpus=gpus) for preset, gpus in POINTS)


def against(baseline: str, published: float, summary: Callable[[list[float]], float], text: str) -> Row:
    half = len(POINTS)

    def predict(*results: Result) -> float:
        return summary([speed_up(fast, slow) for fast, slow in zip(results[:half], results[half:], strict=True)])

    return Row("Laminar", text, published, "speed-up", laminar("trajectory") + laminar(baseline), predict)


def scaling(preset: str) -> tuple[Case, Case]:
    scales = SCALES[preset]
    return (case(preset, "trajectory", cluster__gpus=scales[0]), case(preset, "trajectory", cluster__gpus=scales[-1]))


def efficiency(*results: Result) -> float:
    pairs = zip(results[::2], results[1::2], strict=True)
    return mean(speed_up(large, small) / (large.gpus / small.gpus) for small, large in pairs)


REPACK_PAIR = (  # 64 replicas of one GPU
    case("laminar_math_7b", "trajectory"),
    case("laminar_math_7b", "trajectory", repack__enabled=False),
)


def generation_gain(on: Result, off: Result) -> float:
    return on.decoded_tokens_per_s / off.decoded_tokens_per_s


def kv_gain(on: Result, off: Result) -> float:
    return on.kv_usage / off.kv_usage


def costs_of(preset: str, **settings: Any) -> CostModel:
    return CostModel(case(preset, "trajectory", **settings).config())


def laminar_rows() -> list[Row]:
    return [
        against("sync", 2.56, mean, "over verl, mean of 12 points"),
        against("one_step", 1.98, mean, "over one-step, mean"),
        against("stream", 1.93, mean, "over stream generation, mean"),
        against("partial", 1.39, mean, "over AReaL, mean"),
        against("sync", 5.48, max, "over verl, maximum"),
        Row("Laminar", "repack: generation throughput", 1.26, "speed-up", REPACK_PAIR, generation_gain),
        Row(
            "Laminar",
            "repack: KV use, on over off",
            1.148,
            "other",
            REPACK_PAIR,
            kv_gain,
        ),
        Row("Laminar", "strong scaling, mean", 0.537, "other", sum((scaling(p) for p in SCALES), ()), efficiency),
        Row("Laminar", "strong scaling, 32B", 0.682, "other", scaling("laminar_math_32b"), efficiency),
        Row("Laminar", "actor stall, 32B, s", 0.64, "absolute", (), lambda: costs_of("laminar_math_32b").push()),
        Row("Laminar", "actor stall, 72B, s", 1.40, "absolute", (), lambda: costs_of("laminar_math_72b").push()),
        Row(
            "Laminar",
            "broadcast, 72B, 127 relays, s (below)",
            1.6,
            "absolute",
            (),
            lambda: costs_of("laminar_math_72b").broadcast(128),
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ AReaL


def areal(schedule: str, model: str, gpus: int, ways: int, trainer_ways: int, code: bool) -> Case:
    settings: dict[str, Any] = {
        "model__preset": f"r1-distill-qwen-{model}",
        "cluster__gpus": gpus,
        "split__tensor_parallel": ways,
        "split__trainer_parallel": trainer_ways,
    }
    if code:
        settings |= {
            "split__trainer_tensor_parallel": 2,
            "workload__lengths__median": 11000,
            "workload__lengths__mean": 13000,
            "schedule__steps_ahead": 4,
        }
    return case("areal_1_5b", schedule, **settings)


AREAL = [  # model, GPUs, rollout ways, trainer ways, code, steps, hours of verl / sync-AReaL / AReaL
    ("1.5b", 128, 1, 2, False, 250, 33.6, 41.0, 14.8),
    ("7b", 192, 1, 4, False, 250, 52.1, 57.7, 25.4),
    ("14b", 256, 4, 8, True, 80, 44.4, 48.8, 21.9),
    ("32b", 384, 8, 16, True, 60, 46.4, 51.1, 31.1),
]


def areal_rows() -> list[Row]:
    rows: list[Row] = []
    for model, gpus, ways, trainer_ways, code, steps, verl_h, sync_h, async_h in AREAL:
        fast = areal("partial", model, gpus, ways, trainer_ways, code)
        slow = areal("sync", model, gpus, ways, trainer_ways, code)
        rows += [
            Row("AReaL", f"{model} over verl", verl_h / async_h, "speed-up", (fast, slow), speed_up),
            Row("AReaL", f"{model} over its synchronous form", sync_h / async_h, "speed-up", (fast, slow), speed_up),
            Row("AReaL", f"{model}, hours", async_h, "absolute", (fast,), lambda r, n=steps: r.step_s * n / 3600),
            Row("AReaL", f"{model} verl, hours", verl_h, "absolute", (slow,), lambda r, n=steps: r.step_s * n / 3600),
        ]
    return rows


# ------------------------------------------------------------------------------------------------------------- verl


FETCHED = {"efficiency__fetch_us": 2600}  # 21.26 s for the 8,192 samples of a step, where training sets the pace


def verl_async(gpus: int, ahead: float = 0.5) -> Case:
    kind = "partial" if ahead else "stream"
    inflight = gpus // 2 // 4 * 256
    return case(
        "verl_7b_h20",
        kind,
        cluster__gpus=gpus,
        schedule__steps_ahead=ahead,
        schedule__max_inflight=inflight,
        trainer__forward_passes=0,
        trainer__require_batches=4,
        **FETCHED,
    )


VERL = [  # GPUs, seconds of a step, colocated and async; of these training (old log-probs and update; update)
    (32, 790, 295, 377.5, 313.8),
    (64, 365, 189, 203.7, 157.0),
    (128, 356, 151, 167.7, 113.2),
]


def verl_rows() -> list[Row]:
    rows: list[Row] = []
    for gpus, sync_s, async_s, sync_training_s, async_training_s in VERL:
        slow, fast = case("verl_7b_h20", "sync", cluster__gpus=gpus), verl_async(gpus)
        rows += [
            *pair("verl", f"fully async over colocated, {gpus} GPUs", async_s, sync_s, fast, slow),
            Row("verl", f"training of a step, {gpus} GPUs", async_training_s, "absolute", (fast,), training_s),
            Row("verl", f"the same, colocated, {gpus} GPUs", sync_training_s, "absolute", (slow,), training_s),
        ]
    slow = case("verl_7b_h20", "sync", cluster__gpus=128)
    for ahead, seconds in ((0.0, 231), (0.1, 171), (0.3, 146)):
        cases = (verl_async(128, ahead), slow)
        rows.append(Row("verl", f"staleness {ahead:g}, 128 GPUs", 356 / seconds, "speed-up", cases, speed_up))
    return rows


def mixture_case(schedule: str, **own: Any) -> Case:
    return case(
        "verl_7b_h20",
        schedule,
        model__preset=A3B,
        split__trainer_tensor_parallel=2,
        workload__max_completion_tokens=8192,
        workload__lengths__median=1132,
        workload__lengths__mean=1560,
        trainer__mini_batches=4,
        trainer__balance="mini_batch",
        trainer__tokens_per_batch=10240,
        rollout__memory=0.7,
        efficiency__decoding="eager",
        **own,
    )


def tools_case(schedule: str, **own: Any) -> Case:
    turns = {"mean": 4, "maximum": 16, "latency_s": 3, "latency_sigma": 1.0, "tool_tokens": 150}
    return case(
        "verl_7b_h20",
        schedule,
        model__preset="qwen2.5-7b",
        cluster__gpus=32,
        workload__prompts_per_step=64,
        workload__max_completion_tokens=16384,
        workload__lengths__median=2756,
        workload__lengths__mean=3795,
        trainer__mini_batches=4,
        trainer__balance="mini_batch",
        trainer__tokens_per_batch=18432,
        trainer__forward_tokens_per_batch=4 * 18432,
        rollout__memory=0.8,
        **{f"workload__turns__{name}": value for name, value in turns.items()},
        **own,
    )


def verl_later_rows() -> list[Row]:
    mixture = mixture_case("sync", trainer__forward_passes=2)
    mixture_async = mixture_case(
        "partial", split__trainer_gpus=32, schedule__max_inflight=24 * 256, trainer__forward_passes=1, **FETCHED
    )
    tools = tools_case("sync")
    tools_async = tools_case(
        "partial", schedule__steps_ahead=1, schedule__max_inflight=4 * 256, trainer__forward_passes=0, **FETCHED
    )
    return [
        *pair("verl 30B-A3B", "fully async over colocated, 128 GPUs", 282.75, 497.89, mixture_async, mixture),
        *pair("verl tools", "fully async over colocated, 32 GPUs", 221.36, 375.47, tools_async, tools),
    ]


HYBRID_35B = {  # Qwen3.5-35B-A3B: attention with a KV cache in 10 of 40 layers
    "model__preset": "",
    "model__parameters": 34.66e9,
    "model__active_parameters": 3.45e9,
    "model__experts": 256,
    "model__experts_per_token": 8,
    "model__layers": 40,
    "model__hidden": 2048,
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__head_dim": 256,
    "model__bytes_per_kv": 0.5,
}
HYBRID_4B = {  # Qwen3.5-4B: in 8 of 32 layers
    "model__preset": "",
    "model__parameters": 4.2e9,
    "model__layers": 32,
    "model__hidden": 2560,
    "model__heads": 4,
    "model__kv_heads": 4,
    "model__head_dim": 256,
    "model__bytes_per_kv": 0.5,
}


def v1_case(schedule: str, tokens: int, **own: Any) -> Case:
    """`tokens`: the published mean of answers."""
    return case(
        "verl_7b_h20",
        schedule,
        **HYBRID_35B,
        cluster__gpu="H100",
        cluster__gpus=32,
        split__trainer_parallel=8,
        split__trainer_tensor_parallel=2,
        split__trainer_pipeline_parallel=2,
        workload__prompts_per_step=64,
        workload__group_size=8,
        workload__max_completion_tokens=32768,
        workload__lengths__median=0,
        workload__lengths__sigma=0.8,
        workload__lengths__mean=tokens,
        trainer__mini_batches=4,
        trainer__recompute=True,
        trainer__tokens_per_batch=34816,
        **own,
    )


V1_AHEAD = {
    "schedule__steps_ahead": 1,
    "schedule__max_inflight": 2 * 64 * 8,
    "schedule__max_staleness": 8,
    "schedule__order": "oldest",
}


def v1_rows() -> list[Row]:
    sync = v1_case("sync", 12720, schedule__max_inflight=0, schedule__steps_ahead="unset")
    shared = v1_case("partial", 12854, split__colocated=True, **V1_AHEAD)
    apart = v1_case("partial", 12288, cluster__collective_gbytes_per_s=14, trainer__balance="mini_batch", **V1_AHEAD)
    rows = [Row("verl V1", "sync, s a step", 22.79 * 3600 / 150, "absolute", (sync,), step_s)]
    for name, fast, rate, hours in (("colocated", shared, 18852, 14.72), ("separate", apart, 18829, 14.10)):
        rows += [
            Row("verl V1", f"{name} async over sync", rate / 12053, "speed-up", (fast, sync), speed_up),
            Row("verl V1", f"{name} async, s a step", hours * 3600 / 150, "absolute", (fast,), step_s),
        ]
    return rows


def mi300x_rows() -> list[Row]:
    own = {
        "cluster.gpu": "MI300X",
        "workload.lengths.mean": 890,
        "trainer.balance": "mini_batch",
    }
    slow, fast = case("verl_7b_h20", "sync", cluster__gpus=32), verl_async(32).with_setting("rollout.memory", 0.8)
    for key, value in own.items():
        slow, fast = slow.with_setting(key, value), fast.with_setting(key, value)
    return pair("verl MI300X", "fully async over colocated, 32 GPUs", 219, 394, fast, slow)


def small_case(schedule: str, prompts: int, **own: Any) -> Case:
    return case(
        "verl_7b_h20",
        schedule,
        **HYBRID_4B,
        cluster__gpu="H100",
        cluster__gpus=8,
        split__tensor_parallel=2,
        split__trainer_parallel=2,
        split__trainer_tensor_parallel=2,
        workload__prompts_per_step=prompts,
        workload__group_size=8,
        workload__max_completion_tokens=40960,
        workload__lengths__median=0,
        workload__lengths__sigma=0.31,
        workload__lengths__mean=25000,
        trainer__recompute=True,
        trainer__balance="mini_batch",
        rollout__memory=0.7,
        efficiency__decoding="graph",
        **own,
    )


def small_rows() -> list[Row]:
    slow = small_case("sync", 32, trainer__mini_batches=2, schedule__max_inflight=0, schedule__steps_ahead="unset")
    rows = [Row("verl 4B", "colocated, s a step", 739, "absolute", (slow,), step_s)]
    for text, trainers, prompts, inflight, seconds in (("4 + 4", 4, 128, 32, 778), ("6 + 2", 6, 120, 16, 1603)):
        fast = small_case(
            "partial",
            prompts,
            split__trainer_gpus=trainers,
            schedule__max_inflight=inflight * 8,
            trainer__mini_batches=8,
            trainer__require_batches=2,
            trainer__forward_passes=0,
            **FETCHED,
        )
        ratio = (prompts / 4 / seconds) / (32 / 739)
        rows += [
            Row("verl 4B", f"fully async over colocated, {text} H100", ratio, "speed-up", (fast, slow), speed_up),
            Row("verl 4B", f"{text} H100, s a parameter sync", 4 * seconds, "absolute", (fast,), step_s),
        ]
    return rows


def loong_case(schedule: str, **own: Any) -> Case:
    return case(
        "verl_7b_h20",
        schedule,
        model__preset=A3B,
        cluster__gpus=16,
        split__trainer_parallel=8,
        split__trainer_tensor_parallel=4,
        split__trainer_pipeline_parallel=2,
        workload__prompts_per_step=64,
        workload__group_size=8,
        workload__max_completion_tokens=20480,
        workload__lengths__median=0,
        workload__lengths__sigma=0.8,
        workload__lengths__mean=7050,
        trainer__mini_batches=4,
        trainer__tokens_per_batch=20480,
        trainer__balance="mini_batch",
        rollout__memory=0.8,
        efficiency__decoding="graph",
        **own,
    )


def loong_rows() -> list[Row]:
    slow = loong_case("sync", schedule__max_inflight=0, schedule__steps_ahead="unset")
    fast = loong_case("partial", schedule__steps_ahead=1, schedule__max_inflight=512)
    return pair("LoongSage", "fully async over colocated, 16 GPUs", 451.74, 578.63, fast, slow)


def one_step_case(schedule: str, longest: int, median: int, mean: int) -> Case:
    return case(
        "verl_7b_h20",
        schedule,
        cluster__gpus=16,
        split__trainer_gpus=12,
        split__tensor_parallel=2,
        workload__group_size=12,
        workload__max_completion_tokens=longest,
        workload__lengths__median=median,
        workload__lengths__mean=mean,
        schedule__max_inflight=0,
        schedule__steps_ahead="unset",
    )


ONE_STEP = [  # engine, longest, median and mean answer, seconds of a step, colocated and one step off
    ("FSDP2", 20480, 210, 640, 749, 520),
    ("Megatron", 8192, 350, 900, 699, 566),
]


def one_step_rows() -> list[Row]:
    rows: list[Row] = []
    for name, longest, middle, usual, slow_s, fast_s in ONE_STEP:
        fast, slow = (one_step_case(kind, longest, middle, usual) for kind in ("one_step", "sync"))
        rows += pair("verl one-step", f"over colocated, {name}", fast_s, slow_s, fast, slow)
    return rows


# ------------------------------------------------------------------------------------------------- DORA and LlamaRL


def dora_rows() -> list[Row]:
    ours, sync, one = (case("dora_32b", kind) for kind in ("trajectory", "sync", "one_step"))
    shared = case("dora_32b", "partial", split__colocated=True)
    return [
        Row("DORA", "over sync", 1.65, "speed-up", (ours, sync), speed_up),
        Row("DORA", "over partial rollout", 1.17, "speed-up", (ours, shared), speed_up),
        Row("DORA", "over one-step", 1.65, "speed-up", (ours, one), speed_up),
        Row("DORA", "tokens/s", 23327, "absolute", (ours,), lambda r: r.tokens_per_s),
    ]


LLAMA = {  # model: GPUs, ways of the baseline, ways of its own generator, bytes per weight in there
    "8b": (256, 8, 1, 2),
    "70b": (256, 8, 4, 2),
    "405b": (1024, 64, 8, 1),
}


def llama(model: str, schedule: str) -> Case:
    gpus, baseline_ways, ways, weight_bytes = LLAMA[model]
    own: dict[str, Any] = {"split__tensor_parallel": baseline_ways, "efficiency__switch_s": 0}
    if schedule != "sync":
        own = {"split__tensor_parallel": ways, "model__rollout_bytes_per_weight": weight_bytes}
        own["cluster__collective_gbytes_per_s"] = 120  # as published: 70B in 1.15 s
    settings = {"model__preset": f"llama-3.1-{model}", "cluster__gpus": gpus, "split__trainer_parallel": baseline_ways}
    return case("llamarl_8b", schedule, **settings, **own)


def llama_rows() -> list[Row]:
    published = (("8b", 22.45, 8.90), ("405b", 635.8, 59.5))
    rows = [
        row
        for model, slow, fast in published
        for row in pair("LlamaRL", model.upper(), fast, slow, llama(model, "partial"), llama(model, "sync"))
    ]
    cases = (llama("70b", "partial"), llama("70b", "sync"))
    return [*rows, Row("LlamaRL", "70B", 3.98, "speed-up", cases, speed_up)]


# ---------------------------------------------------------------------------------------------------------- NeMo RL


ASYNC = {  # a batch of prompts belongs to one step, which begins when all of it is there; vLLM's limit for AsyncLLM
    "schedule__staleness_policy": "wait",
    "trainer__require_batches": 4,
    "rollout__max_running": 128,
    "rollout__memory": 0.8,
}


def nemo(schedule: str, model: str, gpus: int, tokens: int, ways: int, trainer_ways: int, **more: Any) -> Case:
    """`tokens`: the published mean of whole sequences."""
    age = more.get("schedule__steps_ahead", 1)
    prompts = more.get("workload__prompts_per_step", 64)
    collector = ASYNC | {"schedule__max_staleness": age, "schedule__max_open": age * prompts}
    settings = {
        "model__preset": model,
        "cluster__gpus": gpus,
        "workload__lengths__mean": tokens - 150,
        "split__tensor_parallel": ways,
        "split__trainer_parallel": trainer_ways,
        "trainer__recompute": model in RECOMPUTED,
        "trainer__forward_tokens_per_batch": FORWARD_TOKENS[model],
        "rollout__memory": 0.6,
        **({} if schedule == "sync" else collector),
        **more,
    }
    return case("nemo_30b_a3b", schedule, **settings)


A3B, DENSE, LLAMA_8B, A22B = "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-8b", "qwen3-235b-a22b"
RECOMPUTED = (LLAMA_8B, A22B)  # activation_checkpointing: True
FORWARD_TOKENS = {A3B: 4 * 4096, DENSE: 4 * 4096, LLAMA_8B: 2 * 4096, A22B: 8192}  # logprob_batch_size sequences
LARGE = {
    "workload__prompts_per_step": 16,
    "workload__max_completion_tokens": 8042,
    "trainer__mini_batches": 1,
    "trainer__tokens_per_batch": 8192,
}
EIGHT_OFF = {"schedule__steps_ahead": 8, "schedule__max_inflight": 8 * 2048, "split__trainer_gpus": 128}


def ways(tensor: int = 1, stages: int = 1) -> dict[str, int]:
    return {"split__trainer_tensor_parallel": tensor, "split__trainer_pipeline_parallel": stages}


LARGE_SYNC, LARGE_ASYNC = LARGE | ways(2, 8), LARGE | ways(4, 8)
LARGE_SYNC_4, LARGE_ASYNC_4 = LARGE | ways(2, 4), LARGE | ways(4, 4)
SYNC_V6 = nemo("sync", A3B, 32, 3203, 2, 1)

NEMO_V4 = [  # name, asynchronous case, synchronous case, tokens/s/GPU of both, seconds of both
    ("Llama 8B", nemo("partial", LLAMA_8B, 16, 1129, 1, 2, **ways(1, 2)),
     nemo("sync", LLAMA_8B, 16, 1060, 1, 2, **ways(1, 2)),
     (2161, 1562), (74.6, 97.7)),
    ("30B-A3B", nemo("partial", A3B, 32, 3158, 2, 2, **ways(2)), nemo("sync", A3B, 32, 3154, 4, 2, **ways(2)),
     (864, 925), (244, 225)),
    ("32B", nemo("partial", DENSE, 64, 3207, 4, 16, **ways(4, 4)), nemo("sync", DENSE, 32, 3206, 4, 16, **ways(4, 4)),
     (494, 540), (215, 393)),
    ("235B-A22B", nemo("partial", A22B, 256, 5691, 8, 32, **LARGE_ASYNC),
     nemo("sync", A22B, 128, 5671, 16, 32, **LARGE_SYNC),
     (52.2, 45.7), (241, 506)),
]  # fmt: skip
NEMO_V5 = [
    ("Llama 8B", nemo("partial", LLAMA_8B, 16, 1123, 1, 1), nemo("sync", LLAMA_8B, 16, 1019, 1, 2, **ways(1, 2)),
     (2478, 1581), (64.8, 92.8)),
    ("30B-A3B", nemo("partial", A3B, 32, 3201, 2, 2, **ways(1, 2)), nemo("sync", A3B, 32, 3196, 2, 1),
     (1391, 1066), (154, 198)),
    ("32B", nemo("partial", DENSE, 64, 3252, 4, 16, **ways(4, 4)), nemo("sync", DENSE, 32, 3251, 4, 16, **ways(4, 4)),
     (538, 571), (200, 376)),
    ("235B-A22B", nemo("partial", A22B, 256, 5707, 8, 32, **LARGE_ASYNC),
     nemo("sync", A22B, 128, 5700, 16, 32, **LARGE_SYNC),
     (58.7, 54.1), (203, 431)),
]  # fmt: skip
NEMO_V6 = [
    ("30B-A3B", nemo("partial", A3B, 32, 3201, 2, 2, **ways(1, 2)), SYNC_V6, (1414, 1102), (152, 192)),
    ("30B-A3B, 8 off", nemo("partial", A3B, 192, 3206, 2, 1, **EIGHT_OFF), SYNC_V6, (1025, 1102), (34.5, 192)),
    ("235B-A22B", nemo("partial", A22B, 256, 5721, 8, 32, **LARGE_ASYNC),
     nemo("sync", A22B, 128, 5698, 16, 32, **LARGE_SYNC),
     (58.7, 58.9), (231, 395)),
    ("235B-A22B, same GPUs", nemo("partial", A22B, 256, 5721, 8, 32, **LARGE_ASYNC),
     nemo("sync", A22B, 256, 5713, 16, 32, **LARGE_SYNC), (58.7, 37.4), (231, 312)),
]  # fmt: skip
GB200 = {"cluster__gpu": "GB200", "cluster__gpus_per_host": 4, "cluster__linked_gpus": 64}
GB200_V6 = GB200 | {"trainer__forward_tokens_per_batch": 2 * 4096}
NEMO_GB200 = [
    ("Llama 8B", nemo("partial", LLAMA_8B, 8, 1107, 1, 1, **GB200), nemo("sync", LLAMA_8B, 8, 1066, 1, 1, **GB200),
     (4463, 3359), (71.1, 91.0)),
    ("30B-A3B", nemo("partial", A3B, 32, 3204, 1, 1, **GB200), nemo("sync", A3B, 16, 3198, 1, 1, **GB200),
     (1558, 1822), (136, 232)),
    ("32B", nemo("partial", DENSE, 32, 3258, 1, 2, **ways(2), **GB200),
     nemo("sync", DENSE, 16, 3253, 1, 2, **ways(2), **GB200),
     (1025, 1127), (210, 381)),
    ("235B-A22B", nemo("partial", A22B, 128, 5711, 8, 16, **LARGE_ASYNC_4, **GB200),
     nemo("sync", A22B, 64, 5711, 8, 16, **LARGE_SYNC_4, **GB200),
     (87.9, 140), (268, 332)),
]  # fmt: skip
NEMO_GB200_V6 = [
    ("30B-A3B, same GPUs", nemo("partial", A3B, 16, 3197, 1, 1, **GB200_V6),
     nemo("sync", A3B, 16, 3199, 1, 1, **GB200_V6),
     (1406, 1910), (301, 221)),
    ("235B-A22B", nemo("partial", A22B, 128, 5705, 8, 16, **LARGE_ASYNC_4, **GB200),
     nemo("sync", A22B, 64, 5709, 8, 16, **LARGE_SYNC_4, **GB200, rollout__memory=0.4),
     (85.5, 163), (278, 286)),
    ("235B-A22B, same GPUs", nemo("partial", A22B, 128, 5705, 8, 16, **LARGE_ASYNC_4, **GB200),
     nemo("sync", A22B, 128, 5693, 8, 16, **LARGE_SYNC_4, **GB200),
     (85.5, 67.4), (278, 345)),
]  # fmt: skip
LATENT = {  # DeepSeek V3: 576 elements of KV a layer, in every way; attention with 128 heads of 192 and 128
    "model__preset": "",
    "model__parameters": 671e9,
    "model__active_parameters": 37e9,
    "model__experts": 256,
    "model__experts_per_token": 8,
    "model__layers": 61,
    "model__hidden": 7168,
    "model__heads": 64,
    "model__kv_heads": 1,
    "model__head_dim": 320,
    "model__bytes_per_kv": 2 * 576 / 640,
    "workload__prompts_per_step": 32,
    "workload__group_size": 16,
    "workload__max_completion_tokens": 1386,
    "trainer__mini_batches": 1,
    "trainer__tokens_per_batch": 1536,
}


def deepseek(schedule: str, gpus: int, tokens: int, ways_: int, stages: int, **more: Any) -> Case:
    per_forward = 1536 if schedule == "sync" else 2 * 1536  # logprob_batch_size
    own = {**LATENT, **ways(1, stages), "trainer__forward_tokens_per_batch": per_forward, **more}
    if schedule == "sync":  # new weights take 35 s when colocated, beside the change of roles
        own |= {"efficiency__switch_s": 10 + 35}
    return nemo(schedule, A22B, gpus, tokens, ways_, stages, **own)


LATENT_SYNC = {**GB200, "rollout__memory": 0.3}
DEEPSEEK = [
    ("H100 v0.4", deepseek("partial", 512, 744, 32, 16), deepseek("sync", 256, 745, 32, 16), (11.0, 11), (77.9, 154)),
    ("H100 v0.5", deepseek("partial", 512, 738, 32, 16), deepseek("sync", 256, 744, 32, 16), (13.1, 12.7), (64.9, 134)),
    ("H100 v0.6", deepseek("partial", 512, 710, 32, 16), deepseek("sync", 256, 701, 32, 16), (12.8, 12.1), (64.1, 134)),
    ("H100 v0.6, same GPUs", deepseek("partial", 512, 710, 32, 16), deepseek("sync", 512, 697, 32, 16),
     (12.8, 7.24), (64.1, 111)),
    ("GB200 v0.5", deepseek("partial", 256, 994, 16, 8, **GB200), deepseek("sync", 128, 996, 32, 8, **GB200),
     (31.7, 34.3), (64.5, 128)),
    ("GB200 v0.6", deepseek("partial", 256, 708, 16, 8, **GB200), deepseek("sync", 128, 711, 32, 8, **LATENT_SYNC),
     (26.7, 30.2), (61.7, 108)),
    ("GB200 v0.6, same GPUs", deepseek("partial", 256, 708, 16, 8, **GB200),
     deepseek("sync", 256, 700, 32, 8, **LATENT_SYNC), (26.7, 16.4), (61.7, 98.7)),
]  # fmt: skip
NEMO = (  # source, table, GB/s at which the trainer sends weights
    ("NeMo RL v0.4", NEMO_V4, 85),
    ("NeMo RL v0.5", NEMO_V5, 85),
    ("NeMo RL v0.6", NEMO_V6, 85),
    ("NeMo RL GB200", NEMO_GB200, 85),
    ("NeMo RL v0.6 GB200", NEMO_GB200_V6, 85),
    ("NeMo RL DeepSeek V3", DEEPSEEK, 96),
)


def nemo_rows() -> list[Row]:
    asynchronous = NEMO_V6[2][1].with_setting("cluster.collective_gbytes_per_s", 85)
    larger = asynchronous.with_setting("rollout.memory", 0.88)
    rows = [
        Row(
            "NeMo RL v0.6",
            "235B-A22B, 0.88 of the memory over 0.8",
            57.8 / 51.5,
            "other",
            (larger, asynchronous),
            speed_up,
        )
    ]
    for source, table, refit in NEMO:
        for name, ahead, slow, rates, seconds in table:
            fast = ahead.with_setting("cluster.collective_gbytes_per_s", refit)
            rows += [
                Row(source, f"{name}, per GPU", rates[0] / rates[1], "speed-up", (fast, slow), per_gpu),
                Row(source, f"{name}, s a step", seconds[0], "absolute", (fast,), step_s),
                Row(source, f"{name} on policy, s a step", seconds[1], "absolute", (slow,), step_s),
            ]
    return list({(row.source, row.figure, row.cases): row for row in rows}.values())


def rows() -> list[Row]:
    verl = verl_rows() + verl_later_rows() + one_step_rows()
    verl += v1_rows() + mi300x_rows() + small_rows() + loong_rows()
    return laminar_rows() + areal_rows() + verl + dora_rows() + llama_rows() + nemo_rows()
