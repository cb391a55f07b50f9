"""The frozen tree of settings: every field with its type, its default and what it means.

`load.py` makes one from TOML files and command-line options, `check.py` refuses what cannot work. Nothing here touches
the machine: a `Config` is a value. Derived figures are properties, so no field is ever written back.
"""

from __future__ import annotations

from typing import Annotated, Literal, dataclass_transform

import msgspec
from msgspec import Meta

ScheduleKind = Literal["sync", "one_step", "stream", "partial", "trajectory"]
SCHEDULES: tuple[ScheduleKind, ...] = ("sync", "one_step", "stream", "partial", "trajectory")

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, named fields only, unknown keys refused."""


class Model(Section):
    """The shape of the policy: what its weights and its KV cache weigh."""

    preset: str = ""  # a known shape ("qwen2.5-7b"); the fields below then override it
    hf_config: str = ""  # or the path of a Hugging Face config.json
    parameters: Amount = 0.0
    active_parameters: Amount = 0.0  # of a mixture of experts; 0: all of them
    layers: Natural = 0
    hidden: Natural = 0
    heads: Natural = 0
    kv_heads: Natural = 0
    head_dim: Natural = 0  # 0: hidden / heads
    bytes_per_weight: Amount = 2.0
    bytes_per_kv: Amount = 2.0

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_weight

    @property
    def active(self) -> float:
        return self.active_parameters or self.parameters

    @property
    def kv_bytes_per_token(self) -> float:
        width = self.head_dim or self.hidden // max(self.heads, 1)
        return 2 * self.layers * (self.kv_heads or self.heads) * width * self.bytes_per_kv


class Cluster(Section):
    """The machines. Bandwidth, arithmetic, memory and price of a card come from the catalogue of GPUs."""

    gpu: str = "H100"
    gpus: Count = 8
    gpus_per_host: Count = 8
    trainer_gpu: str = ""  # another kind of card for the trainer; empty: the same
    network_gbytes_per_s: Annotated[float, Meta(gt=0)] = 100.0  # host to host, host memory to host memory
    collective_gbytes_per_s: Amount = (
        0.0  # a system without relays: weights go to all replicas in one collective of this
    )
    # rate, and trainer and replicas stop for it (verl's documentation: 57 GB in 6 to 7 s); 0: through the relay tier
    hop_latency_us: Amount = 25.0  # start of one message between two hosts


class Split(Section):
    """Who gets which GPUs."""

    trainer_gpus: Natural = 0  # 0: trainer_share of the cluster
    trainer_share: Share = 0.5
    tensor_parallel: Count = 1  # GPUs per replica
    trainer_parallel: Count = 1  # GPUs that work on one sequence together (tensor x context x pipeline ways)
    trainer_tensor_parallel: Count = 1  # how many of these are tensor ways, which exchange activations at every layer
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

    mean: Annotated[float, Meta(ge=1)] = 1.0
    maximum: Count = 1
    latency_s: Amount = 0.0  # mean time of one environment call
    latency_sigma: Amount = 1.0  # its spread (log-normal)
    tool_tokens: Natural = 0  # tokens that each call adds to the context


class Workload(Section):
    """What is to be generated and trained at every step."""

    prompts_per_step: Count = 512
    group_size: Count = 16
    prompt_tokens: Natural = 512
    max_completion_tokens: Count = 16384
    lengths: Lengths = Lengths(median=2000, sigma=1.0)
    turns: Turns = Turns()
    reward_s: Amount = 0.0  # time to score one trajectory

    @property
    def trajectories_per_step(self) -> int:
        return self.prompts_per_step * self.group_size


class Schedule(Section):
    """Which policy of the control plane runs."""

    kind: ScheduleKind = "trajectory"
    max_staleness: Natural = 4  # versions between a trajectory's oldest token and the step that trains on it
    staleness_policy: Literal["drop", "wait"] = "drop"
    order: Literal["fifo", "freshest"] = "fifo"
    # how many steps of data may be started ahead of the trainer; unset: half of max_staleness under `drop`, all of it
    # under `wait`, at most 1 for `stream`
    steps_ahead: Amount | None = None
    max_inflight: Natural = 0  # trajectories in flight over all replicas; 0: one step's worth (trajectory: see kv_fill)
    kv_fill: Annotated[float, Meta(gt=0)] = (
        1.5  # trajectory: size of a replica's batch, as a multiple of what its KV holds
    )
    publish_every: Count = 1
    in_flight_kv: Literal["recompute", "keep"] = "recompute"  # partial: what an update does to the KV of running work


class Repack(Section):
    """Consolidation of long-tail trajectories onto few replicas (schedule `trajectory`)."""

    enabled: bool = True
    every_s: Annotated[float, Meta(gt=0)] = 5.0
    kv_threshold: Share = 0.9  # C_max, as a share of a replica's KV capacity


class Groups(Section):
    """When a group is given up, retried or delivered without its stragglers."""

    deadline_s: Amount = 3600.0  # after this the group goes on with the samples that are done
    min_survivors: Count = 2
    attempts: Count = 3  # tries per sample before it counts as failed


class Relay(Section):
    """The tier that holds weights in host memory."""

    topology: Literal["chain", "tree"] = "chain"
    fan_out: Annotated[int, Meta(ge=2)] = 2
    keep_versions: Annotated[int, Meta(ge=2)] = 2
    quota_gbytes: Amount = 0.0  # bytes of weights a host may hold; 0: keep_versions decides alone
    chunk_mbytes: Amount = 0.0  # 0: the size that minimises the broadcast time


class Health(Section):
    """When silence counts as death, and how often a part is started again."""

    heartbeat_s: Annotated[float, Meta(gt=0)] = 1.0
    strikes: Count = 3  # missed heartbeats until a part counts as lost
    backoff_s: Amount = 2.0  # wait before the first restart; doubles each time
    backoff_max_s: Amount = 60.0
    max_restarts: Natural = 5  # then it is quarantined; healthy work resets the count
    pull_deadline_s: Annotated[float, Meta(gt=0)] = 120.0


class Trainer(Section):
    """How a step is cut and what it costs beside forward and backward."""

    mini_batches: Count = (
        4  # optimiser steps per training step; groups stream in at this grain where the schedule allows
    )
    forward_passes: Amount = 1.0  # extra forward passes per token (old log-probs, reference)
    checkpoint_every: Count = 1


class Rollout(Section):
    """Limits of one replica's engine."""

    max_running: Count = 1024  # sequences decoded together
    roofline_batch: Natural = 0  # largest batch whose decode step is still flat; 0: from the cost model


class Faults(Section):
    """Failures to inject in virtual time, as mean events per hour over the whole fleet, drawn from the run's seed."""

    replica_per_hour: Amount = 0.0
    host_per_hour: Amount = 0.0
    relay_per_hour: Amount = 0.0
    master_per_hour: Amount = 0.0
    trainer_per_hour: Amount = 0.0
    controller_per_hour: Amount = 0.0
    slow_per_hour: Amount = 0.0
    partition_per_hour: Amount = 0.0
    sample_failure: Share = 0.0  # share of samples whose environment or reward fails
    delay_s: Amount = 0.0  # mean extra delay of a message (exponential: messages overtake each other)
    duplicate: Share = 0.0  # share of messages that arrive twice
    restart_s: Amount = 60.0  # until a lost part runs again


class Run(Section):
    """The run itself."""

    name: str = ""
    seed: Natural = 0
    steps: Count = 10


class Config(Section):
    """Everything a run is told."""

    model: Model = Model()
    cluster: Cluster = Cluster()
    split: Split = Split()
    workload: Workload = Workload()
    schedule: Schedule = Schedule()
    repack: Repack = Repack()
    groups: Groups = Groups()
    relay: Relay = Relay()
    health: Health = Health()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    faults: Faults = Faults()
    run: Run = Run()

    @property
    def colocated(self) -> bool:
        chosen = self.split.colocated
        return self.schedule.kind == "sync" if chosen is None else chosen

    @property
    def trainer_gpus(self) -> int:
        if self.colocated:
            return self.cluster.gpus
        if self.split.trainer_gpus:
            return self.split.trainer_gpus
        unit = self.split.trainer_parallel
        return unit * max(1, round(self.cluster.gpus * self.split.trainer_share / unit))

    @property
    def rollout_gpus(self) -> int:
        return self.cluster.gpus if self.colocated else self.cluster.gpus - self.trainer_gpus

    @property
    def replicas(self) -> int:
        return self.rollout_gpus // self.split.tensor_parallel

    @property
    def replicas_per_host(self) -> int:
        return max(1, self.cluster.gpus_per_host // self.split.tensor_parallel)
