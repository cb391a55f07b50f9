"""The frozen tree of settings: every field with its type, its default and what it means.

`load.py` makes one from TOML files and command-line options, `check.py` refuses what cannot work. Nothing here touches
the machine: a `Config` is a value. Derived figures are properties, so no field is ever written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal, dataclass_transform

import msgspec
from msgspec import Meta

from tailrace.config.kinds import FleetHost, GpuKind, fleet_hosts, kinds_of
from tailrace.wording import counted

ScheduleKind = Literal["sync", "one_step", "stream", "partial", "trajectory", "adaptive"]
SCHEDULES: tuple[ScheduleKind, ...] = ("sync", "one_step", "stream", "partial", "trajectory", "adaptive")

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Attained = Annotated[float, Meta(gt=0, le=1)]
Processes = Annotated[int, Meta(ge=1, le=1024)]
SomeProcesses = Annotated[int, Meta(ge=0, le=1024)]  # 0: other machines bring them
AUTO = "auto"
if TYPE_CHECKING:
    SomeOrAuto = int  # "auto" becomes a number before a run starts (launch/cards.py): nobody else meets the word
else:
    SomeOrAuto = SomeProcesses | Literal["auto"]
WITHOUT_CARDS = 2  # what "auto" means where no GPU is
Speed = Annotated[float, Meta(ge=0.001, le=1000)]
Streams = Annotated[int, Meta(ge=0, le=64)]
PerHour = Annotated[float, Meta(ge=0, le=1e6)]
Pause = Annotated[float, Meta(ge=0.01)]  # seconds between two of something that goes on for ever


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, named fields only, unknown keys refused."""


class Model(Section):
    """The shape of the policy: what its weights and its KV cache weigh."""

    preset: str = ""  # a known shape ("qwen2.5-7b"); the fields below then override it
    hf_config: str = ""  # or the path of a Hugging Face config.json
    # what is really trained: a Hugging Face model directory, a GGUF file, or "package:NAME" for the GGUF file that an
    # installed Python package carries
    path: str = ""
    parameters: Amount = 0.0
    active_parameters: Amount = 0.0  # of a mixture of experts; 0: all of them
    experts: Natural = 0  # of a layer that is a mixture; 0: unknown, or none
    experts_per_token: Natural = 0
    layers: Natural = 0
    hidden: Natural = 0
    heads: Natural = 0
    kv_heads: Natural = 0
    head_dim: Natural = 0  # 0: hidden / heads
    context: Natural = 0  # most tokens of a sequence, prompt included; 0: unknown
    bytes_per_weight: Amount = 2.0
    rollout_bytes_per_weight: Amount = 0.0  # simulation: of weights that engines generate with (fp8: 1); 0: the same
    bytes_per_kv: Amount = 2.0

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_weight

    @property
    def rollout_weight_bytes(self) -> float:
        return self.parameters * (self.rollout_bytes_per_weight or self.bytes_per_weight)

    @property
    def active(self) -> float:
        return self.active_parameters or self.parameters

    @property
    def used_share(self) -> float:
        """Of the experts that a token may use, those that it does; 1 without experts."""
        if self.experts and self.experts_per_token:
            return min(1.0, self.experts_per_token / self.experts)
        return self.active / self.parameters if self.parameters else 1.0

    @property
    def expert_parameters(self) -> float:
        """Of all experts, of which a token uses `used_share`; the rest of the model is used by every token."""
        return (self.parameters - self.active) / (1.0 - self.used_share) if self.used_share < 1.0 else 0.0

    @property
    def kv_bytes_per_token(self) -> float:
        width = self.head_dim or self.hidden // max(self.heads, 1)
        return 2 * self.layers * (self.kv_heads or self.heads) * width * self.bytes_per_kv


class Cluster(Section):
    """The machines. Bandwidth, arithmetic, memory and price of a card come from the catalogue of GPUs.

    One kind of card is `gpu` and `gpus`. Of several, each has a table in `cards` that says how many there are.
    """

    gpu: str = "H100"
    gpus: Count = 8  # of all kinds
    gpus_per_host: Count = 8
    linked_gpus: Natural = 0  # cards that reach each other over their interconnect (NVL72: 72); 0: those of a host
    # the kind of card that trains; empty: `gpu`, or of several kinds the first that has a table
    trainer_gpu: str = ""
    network_gbytes_per_s: Annotated[float, Meta(gt=0)] = 100.0  # host to host, host memory to host memory
    # host to host, GPU to GPU (NCCL over RDMA): what the trainer's ranks exchange; eight links of 400 Gb/s
    gpu_network_gbytes_per_s: Annotated[float, Meta(gt=0)] = 400.0
    collective_gbytes_per_s: Amount = (
        0.0  # a system without relays: weights go to all replicas in one collective of this
    )
    # rate, and trainer and replicas stop for it (verl's documentation: 57 GB in 6 to 7 s); 0: through the relay tier
    hop_latency_us: Amount = 25.0  # start of one message between two hosts
    # kinds of card, as tables [cluster.cards.H800]. How many and where: gpus, gpus_per_host, tensor_parallel, site.
    # Figures and prices that differ from the catalogue, or of cards that it lacks: memory_gbytes, memory_gbytes_per_s,
    # tflops, interconnect_gbytes_per_s, host_gbytes_per_s, dollars_per_hour. gpu: which card it is, if not the name
    cards: dict[str, Any] = {}
    # links from sites to the others, as tables [cluster.sites.NAME]: gbytes_per_s, latency_ms
    sites: dict[str, Any] = {}

    def __hash__(self) -> int:  # as that of the task's settings
        return hash(msgspec.json.encode(self))


class GpuSplit(Section):
    """Who gets which GPUs."""

    trainer_gpus: Natural = 0  # 0: trainer_share of the cluster
    trainer_share: Share = 0.5
    tensor_parallel: Count = 1  # GPUs per replica
    trainer_parallel: Count = 1  # GPUs that work on one sequence together (tensor x context x pipeline ways)
    trainer_tensor_parallel: Count = 1  # how many of these are tensor ways, which exchange activations at every layer
    trainer_pipeline_parallel: Count = 1  # and how many pipeline stages, which have a part of the layers each
    colocated: bool | None = None  # generate and train in turn on all GPUs; unset: only `sync` does


class Lengths(Section):
    """The law of completion lengths, in tokens. Give two of median, mean, sigma, p99, or a file of samples."""

    law: Literal["lognormal", "mixture", "empirical", "fixed"] = "lognormal"
    median: Amount = 0.0
    mean: Amount = 0.0
    sigma: Amount = 0.0
    p99: Amount = 0.0
    tail_share: Share = 0.0  # mixture: the share of trajectories that come from the Pareto tail
    tail_alpha: Amount = 0.0  # mixture: its exponent; above 1, or there is no mean
    file: str = ""  # empirical: a text or JSON list of lengths, or a run whose journal has them
    correlation: Share = 0.5  # how alike the samples of one prompt are (0: independent, 1: same length)
    drift_per_step: float = 0.0  # relative growth of all lengths with every trained step


class Turns(Section):
    """Multi-turn episodes: the completion is generated in several turns with an environment call in between."""

    mean: Annotated[float, Meta(ge=1, le=10_000)] = 1.0
    maximum: Annotated[int, Meta(ge=1, le=20_000)] = 1
    latency_s: Amount = 0.0  # mean time of one environment call
    latency_sigma: Amount = 1.0  # its spread (log-normal)
    tool_tokens: Natural = 0  # tokens that each call adds to the context


class Difficulty(Section):
    """Simulation: how often prompts are solved. Without rows, samples get no reward."""

    rows: Natural = 0  # of the data: after so many prompts the first comes again
    easy: Share = 1 / 3  # share of rows that are nearly always solved
    hard: Share = 1 / 3  # and nearly never, as far as the easy ones leave any; the rest is useful
    drift_per_step: float = 0.0  # growth of the log-odds of success with every trained step


class Workload(Section):
    """What is to be generated and trained at every step."""

    prompts_per_step: Count = 512
    group_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    prompt_tokens: Natural = 512
    max_completion_tokens: Count = 16384
    lengths: Lengths = Lengths(median=2000, sigma=1.0)
    turns: Turns = Turns()
    difficulty: Difficulty = Difficulty()
    reward_s: Amount = 0.0  # time to score one trajectory

    @property
    def trajectories_per_step(self) -> int:
        return self.prompts_per_step * self.group_size


class TaskSettings(Section):
    """The prompts and how answers to them are judged: a built-in task by name, or your own data and reward."""

    name: str = ""  # built in: "running_total", "calculator", "reasoning_gym"; a class, "my_env.py:Maze"; empty: data
    options: dict[str, Any] = {}  # of a built-in task, as a table [task.options]
    data: str = ""  # JSONL or parquet file, or a saved Hugging Face dataset, with `prompt` and `answer`
    eval_data: str = ""  # held-out rows; empty: the last `eval_rows` of data
    eval_rows: Natural | None = None  # unset: 256, of few rows a fifth
    reward: str = ""  # a function, "my_rewards:exact" or "rewards.py:exact"; empty: is the final answer the row's?
    reward_timeout_s: Annotated[float, Meta(gt=0)] = 10.0  # for one sample; then its process is killed
    reward_workers: Processes = 1  # processes per replica that score and run tools
    system: str = ""  # system message of every conversation
    chat: bool | None = None  # render through the tokenizer's chat template; unset: if it has one
    tools: Literal["", "calculator", "python"] = ""  # what the policy may call between its turns
    sandbox: Literal["strong", "weak"] = "strong"  # python: weak runs programs even where they cannot be walled off
    max_turns: Count = 1  # with a tool: 3, unless it is given
    shuffle: bool = True
    start: Natural = 0  # prompts of the sequence that are left out at its beginning: an earlier run had them
    epochs: Natural = 0  # passes over the rows before the run ends; 0: until all steps are done

    def __hash__(self) -> int:  # a Config is a key in the planner, and a table has no hash of its own
        return hash(msgspec.json.encode(self))


HELD_OUT = "held_out"  # the set of the task's own held-out rows


class EvalSettings(Section):
    """Evaluation while training: replicas do it beside their work, all samples of one evaluation under one version."""

    every: Natural = 0  # steps between two evaluations; 0: only before and after (run.evaluate)
    samples: Annotated[int, Meta(ge=1, le=1024)] = 1  # of each prompt: the k of avg@k and pass@k
    temperature: Amount | None = None  # 0: greedy; unset: as in training
    sets: dict[str, Any] = {}  # more sets of held-out rows, as a table [eval.sets]: name = "data.jsonl"
    by: str = ""  # the set whose avg@k says which version is best; empty: the first
    keep_best: Natural = 0  # checkpoints of the best K versions are kept; 0: none
    patience: Natural = 0  # evaluations in a row without a new best until the run ends; 0: it does not end for that

    def __hash__(self) -> int:  # as that of the task's settings
        return hash(msgspec.json.encode(self))


class Sampling(Section):
    """How tokens are drawn. A token's random number depends on the seed, its trajectory, its position and how often
    that sample has failed."""

    temperature: Amount = 1.0  # 0: greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Natural = 0  # 0: all
    stop: tuple[str, ...] = ()  # strings that end a turn


class Schedule(Section):
    """Which policy of the control plane runs."""

    kind: ScheduleKind = "adaptive"
    max_staleness: Natural = 4  # versions between a trajectory's oldest token and the step that trains on it
    staleness_policy: Literal["drop", "wait"] = "drop"
    order: Literal["fifo", "freshest", "oldest"] | None = None  # unset: oldest for trajectory and adaptive, else fifo
    # how many steps of data may be started ahead of the trainer; unset: half of max_staleness under `drop`, all of it
    # under `wait`, at most 1 for `stream`
    steps_ahead: Amount | None = None
    # trajectories that are generated at once, over all replicas (not those that judges have); 0: one step's worth
    # (trajectory, adaptive: see kv_fill)
    max_inflight: Natural = 0
    max_open: Natural = 0  # groups that are generated at once, each until its last sample has ended; 0: no limit
    # trajectory, adaptive: size of a replica's batch, as a multiple of what its KV holds; unset: 2 where samples keep
    # their version, else 1
    kv_fill: Annotated[float, Meta(gt=0)] | None = None
    publish_every: Count = 1
    mixed_share: Share = 0.5  # adaptive: at most this share of the samples may have tokens of several versions
    # partial, adaptive: what an update does to the KV of running work
    in_flight_kv: Literal["recompute", "keep"] = "recompute"

    @property
    def picks(self) -> Literal["fifo", "freshest", "oldest"]:
        """Which ready groups train first; under `wait` the oldest always do."""
        chosen = "oldest" if self.kind in ("trajectory", "adaptive") else "fifo"
        return "oldest" if self.staleness_policy == "wait" else self.order or chosen


class Repack(Section):
    """Moving of samples between replicas (schedules `trajectory` and `adaptive`): long tails onto few of them, and from
    full ones to idle ones."""

    enabled: bool = True
    every_s: Pause = 5.0
    kv_threshold: Share = 0.9  # C_max, as a share of a replica's KV capacity


class Groups(Section):
    """When a group is given up, retried or delivered without its stragglers."""

    deadline_s: Amount = 3600.0  # after this the group goes on with the samples that are done
    min_survivors: Count = 2
    max_failures: Count = 3  # of a sample until it counts as failed for good
    # groups whose samples all got the same reward: none: trained on; zero_advantage: left out once they are complete
    # (DAPO); all: prompts are skipped and groups stopped before that ([filters])
    filter: Literal["none", "zero_advantage", "all"] = "none"
    max_filtered: Natural = 10_000  # groups in a row that teach nothing, after which the run ends; 0: it goes on
    # rewards of a group that differ by no more than this (where some are above 1: by no more than this share of the
    # largest) are the same reward, with rounding
    reward_tolerance: Amount = 1e-6

    def same(self, rewards: Sequence[float]) -> bool:
        """Whether the samples with these rewards did equally well, so that none has an advantage."""
        low, high = min(rewards), max(rewards)
        return high - low <= self.reward_tolerance * max(1.0, abs(low), abs(high))

    @property
    def skips(self) -> bool:
        """Prompts are skipped by their history."""
        return self.filter == "all"


class Filters(Section):
    """With groups.filter = "all": which prompts are skipped by their history (GRESO), and how many samples of a group
    are started and trained on (AERO)."""

    target: Share = 0.25  # share of groups without advantage that skipping steers towards
    easy_share: Share = 1 / 3  # of that target: all samples right; the rest: all wrong
    rate: Share = 0.03  # by which the chance of a visit moves after every step
    explore: Annotated[float, Meta(ge=0.001, le=1)] = (
        0.01  # a prompt is visited at least with this chance, whatever its history
    )
    rows: Natural = 16_777_216  # of the data that have a history, a byte each; later ones are never skipped
    first_samples: Natural = 0  # of a group, before more is known of it; 0: three quarters of workload.group_size
    add_samples: Count = 2  # that are started at a time, as long as all are wrong
    wrong_per_right: Amount = 4.0  # most wrong samples of a group for each right one that are trained on; 0: all


class RelaySettings(Section):
    """The tier that holds weights in host memory."""

    topology: Literal["chain", "tree"] = "chain"
    fan_out: Annotated[int, Meta(ge=2)] = 2
    keep_versions: Annotated[int, Meta(ge=2)] = 2
    quota_gbytes: Amount = 0.0  # bytes of weights a host may hold; 0: keep_versions decides alone
    chunk_mbytes: Amount = 0.0  # 0: the size that minimises the broadcast time
    streams: Streams = 0  # connections over which a version goes from relay to relay; 0: more over long distances
    # every Nth version goes whole from relay to relay, the others as differences from one that both have, where that is
    # faster; 1: all whole
    full_every: Count = 64
    # TCP's congestion control to relays on other hosts, where the system has it and allows it; "": the system's own
    congestion: str = "bbr"
    transport: Literal["tcp", "nixl"] = "tcp"  # nixl: between relays that have it, where it is faster than TCP
    # the trusted network of NIXL, which neither authenticates nor encrypts: the name of an interface, or a network in
    # which each relay's host has an address
    interface: str = ""
    # an address of the relay's host, or a network in which every relay takes its own host's; off the loopback, links
    # are encrypted
    listen: str = "127.0.0.1"


class Health(Section):
    """When silence counts as death, and how often a component is started again."""

    heartbeat_s: Pause = 0.8  # with `strikes`: the silent are noticed, and replaced, within 3 s
    strikes: Count = 3  # missed heartbeats until a component counts as lost
    backoff_s: Amount = 2.0  # wait before the first restart; doubles each time
    backoff_max_s: Amount = 60.0
    max_restarts: Natural = 5  # then it is quarantined; healthy work resets the count
    pull_deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    stuck_s: Annotated[float, Meta(gt=0)] = (
        600.0  # the longest that a component may be at one thing, such as a mini-batch
    )
    lease_s: Amount = 0.0  # so long a replica of another machine that is cut off keeps the samples that it has


class Strangers(Section):
    """Workers with keys of their own, which are not believed: what they hand in is checked and judged here."""

    checkers: Natural = 0  # replicas of `local.replicas` that check and judge, and do nothing else; 0: no strangers
    check_share: Share = 0.1  # of the samples that a stranger hands in: these are scored again, token by token
    draws: bool = True  # the tokens must be those that the seed gives; False: a stranger may use vLLM, and choose
    hand_in_s: Annotated[float, Meta(gt=0)] = 600.0  # so long a stranger has for a sample; then others generate it
    tolerance: Amount = 0.0  # nats by which log-probs may differ; 0: by the precision of the engine


class Trainer(Section):
    """How a step is cut, what is minimised and how, and what it costs beside forward and backward."""

    mini_batches: Count = (
        4  # optimiser steps per training step; groups stream in at this grain where the schedule allows
    )
    # mini-batches whose groups have to be ready before it begins the first of them; as many as there are: a whole step
    require_batches: Count = 1
    forward_passes: Amount = 1.0  # simulation: extra forward passes per token (old log-probs, reference)
    # simulation: over what sequences are spread evenly over the ranks; "step": so that mini-batches are uneven
    balance: Literal["mini_batch", "step"] = "mini_batch"
    checkpoint_every: Natural = 0  # steps; 0: as often as it costs little (trainer/pace.py)
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 2  # the newest, from which a run is resumed
    archive_every: Natural = 0  # keep every Nth checkpoint permanently (N in steps); 0: none
    advantage: Literal["grpo", "dr_grpo", "rloo", "beta", "gae"] = "grpo"
    loss: Literal["grpo", "dr_grpo", "dapo", "ppo", "decoupled_ppo", "aipo", "tis", "reinforce"] = "decoupled_ppo"
    clip_low: Amount = 0.2
    clip_high: Amount = 0.2  # DAPO: 0.28
    # dual-clip PPO: upper bound on the ratio of tokens with a negative advantage; above 1, 0: off
    dual_clip: Amount = 3.0
    importance_cap: Annotated[float, Meta(gt=0)] = 2.0  # cap on the importance weight (AIPO's rho, TIS, decoupled PPO)
    kl: Amount = 0.0  # weight of the KL divergence from the starting weights (k3 estimate)
    entropy: Amount = 0.0  # weight of an entropy bonus
    gae_lambda: Share = 0.95
    gamma: Share = 1.0
    critic_learning_rate: Amount = 1e-5
    learning_rate: Annotated[float, Meta(gt=0)] = 1e-6
    warmup_steps: Natural = 0  # optimiser steps
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Amount = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.95
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    tokens_per_batch: Count = 16384  # micro-batch token budget; affects memory, not results
    forward_tokens_per_batch: Natural = 0  # simulator: the same in the extra forward passes; 0: as many
    logit_tokens: Natural = 0  # most tokens whose logits exist at once; 0: 1,024, on a GPU what its memory is good for
    precision: Literal["", "float32", "bfloat16"] = ""  # of the arithmetic, not of weights and moments; as in [rollout]
    recompute: bool = False  # activation checkpointing: recompute activations in backward instead of keeping them
    compile: bool = True  # on a GPU in bfloat16: compile the model's blocks, which takes a while for each size of pack
    ranks: Processes = 1  # processes over which weights, gradients and moments are sharded (FSDP2)
    # the trusted network of ranks on several machines: the name of an interface, or a network in which each machine
    # takes its own address; gloo and NCCL neither authenticate nor encrypt
    interface: str = ""
    collective_s: Annotated[float, Meta(gt=0)] = 300.0  # a collective that takes longer ends the rank that waits in it
    sharding: Literal["full", "hybrid"] = "full"  # hybrid: within each host; hosts have copies of each other
    threads: Natural = 0  # CPU threads per rank; 0: torch's choice
    device: str = ""  # "cpu", "cuda"; empty: the GPU if there is one
    cards: tuple[Natural, ...] = ()  # numbers of the GPUs of this machine, one for each rank; empty: the first ones
    engine: Literal["native", "emulated"] = "native"  # emulated: takes the time that [costs] says, trains nothing

    @property
    def waits(self) -> int:
        """How often in a step it waits for groups, where it need not wait for all of them."""
        return ceil(self.mini_batches / self.require_batches)


class Rollout(Section):
    """One replica's engine and its limits."""

    max_running: Count = 1024  # sequences decoded together
    roofline_batch: Natural = 0  # largest batch whose decode step is still flat; 0: from the cost model
    # native; vllm: a vLLM process in its own Python; emulated: takes the time that [costs] says, draws lengths
    engine: Literal["native", "vllm", "emulated"] = "native"
    python: str = ""  # vllm: the Python that has it, such as "/opt/vllm/bin/python"
    vllm: dict[str, Any] = {}  # vllm: its own settings, as a table [rollout.vllm]: tensor_parallel_size and so on
    kv_tokens: Natural = 0  # size of the KV pool; 0: what memory allows
    memory: Share = 0.0  # share of a GPU's memory for its replicas; 0: 0.85, 0.3 beside a trainer on the same card
    block_tokens: Count = 16  # tokens per KV block
    prefill_tokens: Natural = (
        0  # chunked prefill: most prompt tokens in one engine step; 0: 512 on a CPU, 16384 on a GPU
    )
    stream_tokens: Count = 64  # at most so many tokens of a sample are lost with its replica
    threads: Natural = 1  # CPU threads; 0: torch's choice
    device: str = ""  # "cpu", "cuda"; empty: the GPU if there is one
    cards: tuple[Natural, ...] = ()  # numbers of the GPUs of this machine for replicas; empty: what the trainer leaves
    precision: Literal["", "float32", "bfloat16", "float16"] = ""  # empty: float32 on a CPU, bfloat16 on a GPU
    # emulated, and simulation: how fast replicas are against what their costs say, dealt out in turn; empty: as fast
    speeds: tuple[Speed, ...] = ()
    # dollars per hour of one replica, dealt out in turn: the cheapest are asked to generate first; empty: all free
    prices: tuple[Amount, ...] = ()

    def speed(self, replica: int) -> float:
        return self.speeds[replica % len(self.speeds)] if self.speeds else 1.0

    def price(self, replica: int) -> float:
        return self.prices[replica % len(self.prices)] if self.prices else 0.0

    def __hash__(self) -> int:  # as that of the task's settings
        return hash(msgspec.json.encode(self))


OF_A_REPLICA = ("decode_step", "decode_sequence", "decode_kv_token", "prefill_token", "load")  # fields of [costs]


class Costs(Section):
    """Measured costs of one replica and of the trainer, in seconds (`tailrace fit RUN`). All 0: by the cost model.

    Once they are given, a simulation is of the processes in [local], not of the GPUs in [cluster] and [split].
    """

    decode_step: Amount = 0.0
    decode_sequence: Amount = 0.0  # more for each running sequence
    decode_kv_token: Amount = 0.0  # more for each token in the KV cache
    prefill_token: Amount = 0.0
    train_mini_batch: Amount = 0.0
    train_token: Amount = 0.0
    publish: Amount = 0.0
    load: Amount = 0.0
    kv_tokens: Natural = 0
    weight_mbytes: Amount = 0.0  # of a version that an emulated trainer publishes, where links matter; 0: next to none

    def at_speed(self, speed: float) -> Costs:
        """Of a replica that is so many times as fast; the trainer is as it is."""
        times = {name: getattr(self, name) / speed for name in OF_A_REPLICA}
        return self if speed == 1.0 else msgspec.structs.replace(self, **times)

    @property
    def measured(self) -> bool:
        return self.decode_step > 0 or self.decode_sequence > 0

    @property
    def flat_batch(self) -> int:
        """So many sequences make a decode step twice as long as none: up to there company is cheap."""
        return max(1, int(self.decode_step / self.decode_sequence)) if self.decode_sequence else 0


class Efficiency(Section):
    """Simulation: what engines and trainers attain of the cards' figures. One set for every model and schedule."""

    bandwidth: Attained = 0.8  # of the published memory bandwidth, in decoding; of a link, in collectives
    prefill: Attained = 0.65  # of peak arithmetic, in an engine's prefill
    forward: Attained = 0.51  # and in the trainer's extra forward passes
    training: Attained = 0.7  # and in the matrix products of its forward + backward
    # how often a layer's activations go through a card's memory in one forward pass of the trainer, beside products
    activation_passes: Amount = 6.0
    # floor of one layer of a mixture in one of the trainer's passes over a pack: routing, sorting, sending
    expert_pass_us: Amount = 5000.0
    colocated: Attained = 0.75  # of a trainer's speed, where an engine keeps a part of its cards' memory
    # floor of one layer in a decode step, however little it does; 0: by `decoding`
    layer_us: Amount = 0.0
    # how engines launch a decode step: from CUDA graphs, one kernel after the other, or as published RL systems do
    decoding: Literal["typical", "graph", "eager"] = "typical"
    sequence_us: Amount = 27.0  # host work per sequence and decode step
    all_reduce_us: Amount = 12.0  # latency of one small all-reduce within a host
    host_call_us: Amount = 12000.0  # an engine on several hosts: what calling the others adds to a decode step
    # before it trains on a sample: what handing it over through one process costs; 0: ranks read their own samples
    fetch_us: Amount = 0.0
    switch_s: Amount = 10.0  # colocated: from generation to training and back, per step, beside moving states


class PerSchedule(Section):
    """Settings that differ between schedules, as tables [per_schedule.partial]; they win over those outside.

    `otherwise` is what the schedules without a value of their own have; it is filled in when settings are read.
    """

    sync: dict[str, Any] = {}
    one_step: dict[str, Any] = {}
    stream: dict[str, Any] = {}
    partial: dict[str, Any] = {}
    trajectory: dict[str, Any] = {}
    adaptive: dict[str, Any] = {}
    otherwise: dict[str, Any] = {}

    def __hash__(self) -> int:  # as that of the task's settings
        return hash(msgspec.json.encode(self))


class Faults(Section):
    """Failures to inject in virtual time, as mean events per hour over the whole fleet, drawn from the run's seed."""

    replica_per_hour: PerHour = 0.0
    host_per_hour: PerHour = 0.0
    relay_per_hour: PerHour = 0.0
    master_per_hour: PerHour = 0.0
    trainer_per_hour: PerHour = 0.0
    controller_per_hour: PerHour = 0.0
    slow_per_hour: PerHour = 0.0
    partition_per_hour: PerHour = 0.0
    sample_failure: Share = 0.0  # share of samples whose environment or reward fails
    delay_s: Amount = 0.0  # mean extra delay of a message (exponential: messages overtake each other)
    duplicate: Share = 0.0  # share of messages that arrive twice
    restart_s: Amount = 60.0  # until a lost component runs again


class Local(Section):
    """The processes of a run on this machine."""

    # "auto": one for each GPU that the trainer leaves, 2 without GPUs; 0, with `listen`: other machines bring them
    replicas: SomeOrAuto = WITHOUT_CARDS
    ranks: SomeProcesses | None = None  # of the trainer; unset: all `trainer.ranks`; fewer, with `listen`: as above
    relays: Processes = 1  # as if there were so many hosts; replicas are dealt out to them in turn
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0  # of the controller; 0: any free one
    # an address of this host at which workers of other machines may join, with the key in the run's folder; empty:
    # nobody but the run's own processes, on loopback
    listen: str = ""
    start_s: Annotated[float, Meta(gt=0)] = 180.0  # until a process that was started must have joined
    wait_s: Annotated[float, Meta(gt=0)] = 3600.0  # until other machines must have brought the ranks, and a replica
    cores: Natural = 0  # simulation: [costs] are processor seconds, shared by all processes on so many; 0: wall seconds

    @property
    def is_auto(self) -> bool:
        """How many replicas there are is still to be found out."""
        return str(self.replicas) == AUTO


class Log(Section):
    """Trackers that are told of the run while it goes on, by a process of its own (`tailrace log`)."""

    to: tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "tailrace"  # of wandb and trackio
    samples: Natural = 4  # of every step, with prompt and completion as text; 0: none


class Run(Section):
    """The run itself."""

    name: str = ""  # its directory under `folder`; empty: the name of the settings file
    folder: str = "runs"
    seed: Natural = 0
    steps: Count = 10
    archive: bool = True  # keep the tokens of trajectories that are trained or dropped
    evaluate: bool = True  # held-out accuracy before and after


class Config(Section):
    """Everything a run is told."""

    model: Model = Model()
    cluster: Cluster = Cluster()
    split: GpuSplit = GpuSplit()
    workload: Workload = Workload()
    task: TaskSettings = TaskSettings()
    eval: EvalSettings = EvalSettings()
    sampling: Sampling = Sampling()
    schedule: Schedule = Schedule()
    repack: Repack = Repack()
    groups: Groups = Groups()
    filters: Filters = Filters()
    relay: RelaySettings = RelaySettings()
    health: Health = Health()
    strangers: Strangers = Strangers()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    costs: Costs = Costs()
    efficiency: Efficiency = Efficiency()
    per_schedule: PerSchedule = PerSchedule()
    faults: Faults = Faults()
    local: Local = Local()
    log: Log = Log()
    run: Run = Run()

    @property
    def colocated(self) -> bool:
        chosen = self.split.colocated
        if self.costs.measured or self.kinds:  # cards of several kinds do not take turns
            return False
        return self.schedule.kind == "sync" if chosen is None else chosen

    @property
    def kinds(self) -> tuple[GpuKind, ...]:
        """Of a fleet whose kinds of card are counted in `cluster.cards`; else none."""
        return kinds_of(self.cluster.cards, self.cluster.gpus_per_host, self.split.tensor_parallel)

    @property
    def trainer_kind(self) -> GpuKind | None:
        """The kind of several that trains; its first hosts do."""
        kinds = {kind.name: kind for kind in self.kinds}
        return kinds.get(self.cluster.trainer_gpu) or next(iter(kinds.values()), None)

    @property
    def fleet_hosts(self) -> tuple[FleetHost, ...]:
        """Of several kinds of card: hosts with a relay, in the order in which they pass versions on."""
        trainer = self.trainer_kind
        return fleet_hosts(self.kinds, trainer, self.trainer_gpus, self.cluster.sites) if trainer else ()

    @property
    def trainer_gpus(self) -> int:
        if self.colocated:
            return self.cluster.gpus
        if self.split.trainer_gpus:
            return self.split.trainer_gpus
        unit, gpus = self.split.trainer_parallel, self.cluster.gpus
        share = round(gpus * self.split.trainer_share / unit)
        if self.split.trainer_share < 1:  # as near as it goes: one replica has to fit beside it
            share = min(share, (gpus - self.split.tensor_parallel) // unit)
        if kind := self.trainer_kind:
            share = min(share, kind.gpus // unit)
        return unit * max(1, share)

    @property
    def trainer_gpus_per_host(self) -> int:
        kind = self.trainer_kind
        return kind.gpus_per_host if kind else self.cluster.gpus_per_host

    @property
    def rollout_gpus(self) -> int:
        return self.cluster.gpus if self.colocated else self.cluster.gpus - self.trainer_gpus

    @property
    def replicas(self) -> int:
        if not self.costs.measured:
            hosts = self.fleet_hosts
            return sum([host.replicas for host in hosts]) if hosts else self.rollout_gpus // self.split.tensor_parallel
        return WITHOUT_CARDS if self.local.is_auto else self.local.replicas

    @property
    def first_samples(self) -> int:
        """Samples of a group that are started at once."""
        size = self.workload.group_size
        if self.groups.filter != "all":
            return size
        return min(size, max(self.filters.first_samples or -(-3 * size // 4), self.groups.min_survivors))

    @property
    def local_ranks(self) -> int:
        """Ranks of the trainer on the controller's machine."""
        return self.trainer.ranks if self.local.ranks is None else self.local.ranks

    @property
    def hosts(self) -> int:
        """Hosts with replicas; each has a relay."""
        if self.costs.measured:
            return self.local.relays
        return len(self.fleet_hosts) or -(-self.replicas // self.replicas_per_host)

    @property
    def replica_hosts(self) -> list[int]:
        """The host of each replica: processes are dealt out to the hosts of this machine in turn; GPUs fill one host
        after the other."""
        if self.costs.measured:
            return [replica % self.local.relays for replica in range(self.replicas)]
        if hosts := self.fleet_hosts:
            return [number for number, host in enumerate(hosts) for _ in range(host.replicas)]
        return [replica // self.replicas_per_host for replica in range(self.replicas)]

    @property
    def size(self) -> str:
        """How large the fleet is, in words."""
        count, noun = (self.replicas, "replica") if self.costs.measured else (self.cluster.gpus, "GPU")
        return counted(count, noun)

    @property
    def replicas_per_host(self) -> int:
        return max(1, self.cluster.gpus_per_host // self.split.tensor_parallel)
