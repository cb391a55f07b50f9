"""How long things take, from first principles: bytes over bandwidth, arithmetic over peak, and a few efficiencies.

Where a run has been measured, `measured_costs.py` puts its figures in their place (`cost_model_of` chooses).

One set of constants serves every model, card and schedule: the defaults of `[efficiency]`. `benchmarks/published.py`
holds them against published figures. They say what a good general-purpose engine and trainer reach, not what the
hardware could do at best:

- decoding: a step reads the weights that its tokens use and the KV of every running sequence, pays its arithmetic, a
  floor per layer and some host work per sequence. Bandwidth and host work fit vLLM 0.24 on one H200 (five batch sizes,
  two models); the floor is that of the engines of published RL systems (`LAYER_S`);
- experts (`experts.py`): a batch reads those that its tokens are routed to, in tiles that may be mostly empty;
- an engine whose ways are on several hosts has slower all-reduces, and its hosts are called once a decode step;
- prefill, the trainer's extra forward passes and its forward + backward reach a share of an H100's peak each in their
  matrix products, and as much more or less of another card's as large products do there (`gpus.py`); what else the
  trainer computes is bound by memory bandwidth, and a mixture's layer has a floor;
- tensor parallelism adds two all-reduces a layer, pipeline stages wait for each other at both ends of a mini-batch; the
  exchange of sharded weights and gradients goes on beside the arithmetic, as in FSDP, so that only what is longer than
  that, and the first and last layer of it, is waited for;
- a step of training is as slow as its slowest rank, and a sequence is never split over more than `trainer_parallel`
  GPUs: with many GPUs and long tails, the longest sequence is the step;
- a trainer that shares its cards with engines is slower by a constant.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil

import msgspec
import numpy as np

from tailrace.config.errors import ConfigError
from tailrace.config.kinds import FarLink, GpuKind, link_of
from tailrace.config.tree import Config
from tailrace.sim.chain import best_chunks, broadcast_s, chunk_count, hop_s
from tailrace.sim.experts import ExpertLoads
from tailrace.sim.gpus import Gpu, find, rollout_card, trainer_card
from tailrace.sim.sharding import memory_bound_s

# Floor of one layer in a decode step: a dozen small kernels, however little they do. From CUDA graphs: vLLM 0.24 on one
# H200. One by one: assumed. Typical, of published RL systems: fitted (`benchmarks/published_fit.py`).
LAYER_S = {"typical": 100e-6, "graph": 70e-6, "eager": 400e-6}
# A mixture's layer has more kernels to launch. vLLM with Qwen3-30B-A3B, 48 layers on 4 ways, takes 33.9 ms one by one
# and 10.0 from graphs (its issue 45709): 500 us more a layer.
EAGER_MIXTURE_S = LAYER_S["graph"] + 500e-6
FP8 = 1.74  # arithmetic of fp8 over bf16 (H200, products of a 7B model with 1,024 rows)
ENGINE_MEMORY = 0.88  # share of a card that weights and KV of an engine may take
COLOCATED_MEMORY = 0.7  # the same where a trainer shares the card
ENGINE_RESERVE = 2e9  # bytes per card for activations and graphs
TRAINING_BYTES = 18  # per parameter: bf16 weights, float32 gradients, master weights and two Adam moments
MOST_REPLICAS, MOST_TRAJECTORIES = 1_000_000, 10_000_000  # of one step: all that the memory of a machine holds
PULL_S = 0.05  # start of a pull: pause, map, switch
# A small all-reduce between hosts. Over the cards' interconnect (NVL72): SGLang on GB300, 8 ways on two hosts, takes a
# millisecond longer for 48 layers than with its kernel for one host (its issue 36429). Over the network: nccl-tests on
# two hosts of eight H200 with links of 400 Gb/s, 64 to 83 us for 64 KB to 1 MB.
LINKED_ALL_REDUCE_S, NETWORK_ALL_REDUCE_S = 23e-6, 75e-6


class CostModel:
    """The cost model of one config. Attributes are plain floats, because the engine model reads them at every event."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = config.model
        self.reached = reached = config.efficiency
        self.gpu: Gpu = rollout_card(config.cluster)
        self.trainer_gpu: Gpu = trainer_card(config.cluster)
        ways = config.split.tensor_parallel
        bandwidth = self.gpu.memory_bytes_per_s * reached.bandwidth
        self.loads = ExpertLoads(self.model)
        self.decode_fixed = self.model.layers * self._layer_s(ways) + self._call_s(ways)
        self.decode_weights = self.model.rollout_weight_bytes / (ways * bandwidth)
        self._bases: dict[int, float] = {}
        self.decode_per_sequence = reached.sequence_us * 1e-6
        self.kv_bytes_per_token = kv_bytes_per_token(config, ways)
        self.decode_per_kv_token = self.kv_bytes_per_token / (ways * bandwidth)
        self.prefill_per_token = 2 * self.model.active / self._rollout_flops
        self.prefill_per_token2 = self._attention(1) / self._rollout_flops

    @cached_property
    def _rollout_flops(self) -> float:
        """Of a replica, as far as an engine reaches them."""
        fp8 = FP8 if self.model.rollout_bytes_per_weight == 1 else 1.0
        return self.config.split.tensor_parallel * self.gpu.flops_like_h100 * self.reached.prefill * fp8

    def _layer_s(self, tensor_ways: int) -> float:
        return self._launch_s + (2 * self._all_reduce_s(tensor_ways) if tensor_ways > 1 else 0.0)

    @property
    def _launch_s(self) -> float:
        if self.reached.layer_us:
            return self.reached.layer_us * 1e-6
        eager_mixture = self.reached.decoding == "eager" and self.loads.mixture
        return EAGER_MIXTURE_S if eager_mixture else LAYER_S[self.reached.decoding]

    def _all_reduce_s(self, ways: int) -> float:
        if ways <= self.config.cluster.gpus_per_host:
            return self.reached.all_reduce_us * 1e-6
        return LINKED_ALL_REDUCE_S if ways <= self.config.cluster.linked_gpus else NETWORK_ALL_REDUCE_S

    def _call_s(self, ways: int) -> float:
        """A decode step of an engine on several hosts: the call to the other hosts, and their answer."""
        return self.reached.host_call_us * 1e-6 if ways > self.config.cluster.gpus_per_host else 0.0

    # ------------------------------------------------------------------------------------------------- generation

    def decode_base(self, running: int) -> float:
        """Seconds of one decode step beside reading the KV, which depends on the number of running sequences alone."""
        known = self._bases.get(running)
        if known is None:
            known = self._bases[running] = self._decode_base(running)
        return known

    def _decode_base(self, running: int) -> float:
        loads = self.loads
        weights = self.decode_weights * loads.read_share(running)
        arithmetic = self.prefill_per_token * running * loads.padding(running)
        return self.decode_fixed + self.decode_per_sequence * running + max(weights, arithmetic)

    def prefill(self, tokens: int, context: int) -> float:
        """Seconds to process `tokens` more on top of `context`, alone."""
        return tokens * (self.prefill_per_token + self.prefill_per_token2 * (tokens + 2 * context))

    def _attention(self, tokens: float) -> float:
        """Arithmetic of causal attention over a sequence, forward."""
        width = (self.model.head_dim or self.model.hidden // max(self.model.heads, 1)) * self.model.heads
        return 2.0 * self.model.layers * width * tokens * tokens

    @cached_property
    def kv_capacity(self) -> int:
        """Tokens of KV that one replica can hold."""
        ways = self.config.split.tensor_parallel
        share = self.config.rollout.memory or (COLOCATED_MEMORY if self.config.colocated else ENGINE_MEMORY)
        room = ways * (self.gpu.memory_bytes * share - ENGINE_RESERVE) - self.model.rollout_weight_bytes
        return int(room / self.kv_bytes_per_token)

    @cached_property
    def roofline(self) -> int:
        """The largest batch at which the weights, not the arithmetic, set the pace of a decode step."""
        chosen = self.config.rollout.roofline_batch
        balance = self._rollout_flops / self.config.split.tensor_parallel
        balance /= self.gpu.memory_bytes_per_s * self.reached.bandwidth
        return chosen or max(1, int(balance * self.model.rollout_weight_bytes / max(self.model.parameters, 1) / 2))

    # --------------------------------------------------------------------------------------------------- training

    def train(self, lengths: list[int]) -> float:
        """Seconds of one mini-batch: the slowest rank's work, and what of the exchange is not hidden behind it."""
        sizes = np.asarray(lengths, dtype=np.float64)
        work = self._work(sizes)
        slowest = max(self._largest_share(work), float(work.max(initial=0.0)))
        return self._mini_batch(slowest, float(sizes.sum()) / self._ranks)

    def fetch(self, samples: int) -> float:
        """Seconds that the trainer waits for samples that are there, while one process hands them over."""
        return samples * self.reached.fetch_us * 1e-6

    def _largest_share(self, work: np.ndarray) -> float:
        """Of a rank in a mini-batch. Where ranks are balanced over a step, which of a rank's sequences come together in
        a mini-batch is chance."""
        if self.config.trainer.balance == "mini_batch" or not len(work):
            return float(work.sum()) / self._ranks
        return float(np.bincount(np.arange(len(work)) % self._ranks, weights=work).max())

    def train_at_best(self, lengths: list[int], times: float, mini_batches: int) -> float:
        """Seconds of mini-batches that have `times` these sequences in all, if no rank waits for another."""
        sizes = np.asarray(lengths, dtype=np.float64)
        share = times / mini_batches / self._ranks
        return mini_batches * self._mini_batch(float(self._work(sizes).sum()) * share, float(sizes.sum()) * share)

    def _mini_batch(self, work_s: float, tokens: float) -> float:
        """Of a rank's packs: stages wait for the first of them and after the last, and a pack has a floor."""
        packs, stages = self._packs(tokens), self.config.split.trainer_pipeline_parallel
        forward = self.config.trainer.forward_passes * self._forward_packs(tokens) / packs
        floor = (self._update_passes + forward) * self.model.layers / stages * self._expert_pass_s
        return self._beside_exchange((packs + stages - 1) * (work_s / packs + floor), tokens)

    def _packs(self, tokens: float) -> int:
        return ceil(tokens / self.config.trainer.tokens_per_batch) or 1

    def _forward_packs(self, tokens: float) -> int:
        larger = self.config.trainer.forward_tokens_per_batch
        return (ceil(tokens / larger) or 1) if larger else self._packs(tokens)

    @property
    def _expert_pass_s(self) -> float:
        return self.reached.expert_pass_us * 1e-6 if self.loads.mixture else 0.0

    @cached_property
    def _ranks(self) -> int:
        return max(1, self.config.trainer_gpus // self.config.split.trainer_parallel)

    def _work(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds of each sequence on the GPUs that work on it together, in all passes."""
        forward = 2.0 * self.model.active * sizes + self._attention(1.0) * sizes * sizes
        passes = self._update_passes / self.reached.training
        passes += self.config.trainer.forward_passes / self.reached.forward
        flops = self.config.split.trainer_parallel * self.trainer_gpu.flops_like_h100
        per_token = self._through_memory + self._between_ways + self._between_experts
        return (forward * passes / flops + sizes * per_token) / (self.reached.colocated if self.config.colocated else 1)

    @cached_property
    def _through_memory(self) -> float:
        """Seconds per token of norms, residuals and the like on the GPUs that work on it together."""
        return memory_bound_s(self.config, self._passes) / self.config.split.trainer_parallel

    @cached_property
    def _between_ways(self) -> float:
        """Seconds per token in which tensor ways exchange activations: two all-reduces a layer, in every pass.

        Pipeline and context ways divide that work between them; what they exchange themselves is small.
        """
        split = self.config.split
        tensor_ways = split.trainer_tensor_parallel
        volume = self._passes * 2 * self._activation_bytes * 2.0 * (tensor_ways - 1) / tensor_ways
        return volume / self._trainer_link * tensor_ways / split.trainer_parallel

    @cached_property
    def _between_experts(self) -> float:
        """Seconds per token for sending it to its experts, on other cards of the host, and back."""
        if not self.loads.mixture or self.config.trainer_gpus == 1:
            return 0.0
        volume = self._passes * 2 * self._activation_bytes * max(1, self.model.experts_per_token)
        return volume / self._trainer_link / self.config.split.trainer_parallel

    @property
    def _update_passes(self) -> float:
        """Of an update, in forward passes: backward takes two, and one more computes activations again."""
        return 4.0 if self.config.trainer.recompute else 3.0

    @property
    def _passes(self) -> float:
        return self._update_passes + self.config.trainer.forward_passes

    @property
    def _activation_bytes(self) -> float:
        """What goes through all layers, of one token in bfloat16."""
        return self.model.layers * self.model.hidden * 2.0

    @property
    def _trainer_link(self) -> float:
        return self.trainer_gpu.interconnect_bytes_per_s * self.reached.bandwidth

    def _beside_exchange(self, compute_s: float, tokens: float) -> float:
        """Layers are fetched ahead and gradients sent behind, so both go on beside the arithmetic but for one layer."""
        gather, reduce = self._gather_s, 2.0 * self._gather_s  # gradients are float32
        if self.config.split.trainer_parallel == 1:  # FSDP alone: every pack gathers all weights in every pass
            exchange = self._packs(tokens) * (2.0 + self.config.trainer.forward_passes) * gather + reduce
        else:
            exchange = gather + reduce
        return max(compute_s, exchange) + (gather + reduce) / max(1, self.model.layers)

    @cached_property
    def _gather_s(self) -> float:
        """All sharded weights of a rank, from the others.

        Across hosts: with whole sequences on every card (FSDP alone), the cards of a host need the same weights, which
        enter it once and are shared over its own links. With ways, each card is taken to fetch its part by itself.
        """
        if self._ranks == 1:
            return 0.0
        cluster, ways = self.config.cluster, self.config.split.trainer_parallel
        per_host = self.config.trainer_gpus_per_host
        fetching = 1 if ways == 1 else per_host
        linked = self.config.trainer_gpus <= max(per_host, cluster.linked_gpus)
        network = cluster.gpu_network_gbytes_per_s * 1e9 * self.reached.bandwidth / fetching
        rate = self._trainer_link if linked else min(self._trainer_link, network)
        return self.model.weight_bytes / ways / rate

    @cached_property
    def switch_s(self) -> float:
        """Colocated: to training and back, once a step; the trainer's states come to the cards and leave them."""
        states = TRAINING_BYTES * self.model.parameters / self.config.trainer_gpus
        return self.reached.switch_s + 2.0 * states / self.trainer_gpu.host_bytes_per_s

    # ---------------------------------------------------------------------------------------------------- weights

    def push(self) -> float:
        """Trainer to master relay: the trainer's only stall."""
        if self.config.colocated:
            return 0.0
        return self._collective or self.model.weight_bytes / (self.config.cluster.network_gbytes_per_s * 1e9)

    @property
    def _collective(self) -> float:
        """Seconds of one collective update, for systems that have no relay tier."""
        rate = self.config.cluster.collective_gbytes_per_s * 1e9
        return self.model.weight_bytes / rate if rate else 0.0

    def chunks(self, relays: int) -> float:
        """How many chunks a version is cut into: as configured, or what makes the chain fastest."""
        best = best_chunks(relays, self.transfer, self.latency)
        return chunk_count(self.model.weight_bytes, self.config.relay.chunk_mbytes, best)

    @cached_property
    def transfer(self) -> float:
        """All of a version over one link between two hosts."""
        return self.model.weight_bytes / (self.config.cluster.network_gbytes_per_s * 1e9)

    @property
    def latency(self) -> float:
        return self.config.cluster.hop_latency_us * 1e-6

    def hop(self, relays: int, fan_out: int) -> float:
        """One chunk over one hop; a relay with several targets shares its link between them."""
        return hop_s(self.transfer, self.latency, self.chunks(relays), fan_out)

    def broadcast_start(self, relays: int) -> float:
        """Until the first relay after the master has everything; each one after it needs one hop more."""
        return self.chunks(relays) * self.hop(relays, 1)

    def broadcast(self, relays: int) -> float:
        """A version along a whole chain of `relays`, the master included."""
        return broadcast_s(max(0, relays - 1), self.transfer, self.latency, self.chunks(relays))

    def between(self, site: str, other: str) -> FarLink:
        """The way from one site to another: the slower of their two links, and the delay of both."""
        ends = [link_of(self.config.cluster.sites, each) for each in (site, other)]
        return FarLink(min(end.bytes_per_s for end in ends), sum(end.latency_s for end in ends))

    def everywhere(self) -> float:
        """From a version's end on the master relay until every relay has it."""
        hosts = self.config.fleet_hosts
        home = hosts[0].kind.site if hosts else ""
        links = [self.between(home, host.kind.site) for host in hosts if host.kind.site != home]
        slowest = max([self.model.weight_bytes / link.bytes_per_s for link in links], default=0.0)
        delay = max([link.latency_s for link in links], default=0.0)
        return max(self.broadcast(self.config.hosts), slowest) + delay

    def pull(self, remote: bool) -> float:
        """Relay to replica: each GPU copies its shard over its own link, or from another host over the network."""
        shard = self.model.rollout_weight_bytes / self.config.split.tensor_parallel
        if self.config.colocated:
            return PULL_S + shard / self.gpu.interconnect_bytes_per_s
        if self._collective:
            return PULL_S + self._collective
        return PULL_S + shard / self.gpu.host_bytes_per_s + (self.transfer if remote else 0.0)

    # ------------------------------------------------------------------------------------------------------- money

    @property
    def dollars_per_hour(self) -> float:
        if self.config.colocated:
            return self.config.cluster.gpus * self.gpu.dollars_per_hour
        if kinds := self.config.kinds:
            cards = self.config.cluster.cards
            return sum([kind.gpus * find(kind.name, cards).dollars_per_hour for kind in kinds])
        rollout = self.config.rollout_gpus * self.gpu.dollars_per_hour
        return rollout + self.config.trainer_gpus * self.trainer_gpu.dollars_per_hour


def kv_bytes_per_token(config: Config, ways: int) -> float:
    """Of all cards of a replica: with more ways than key heads, several cards have a copy of the same head."""
    return config.model.kv_bytes_per_token * max(1.0, ways / (config.model.kv_heads or config.model.heads or ways))


def check_fit(config: Config) -> None:
    """Refuse a model that does not fit its GPUs, a sequence its measured pool, a fleet our own memory."""
    _check_size(config)
    if config.costs.measured:
        _check_pool(config)
        return
    if not config.model.parameters:
        raise ConfigError(
            f"model.path is {config.model.path}, whose shape is not known before it is converted; "
            "write model.preset as well, for example model.preset = 'smollm2-135m'"
        )
    costs = CostModel(config)
    generating = dict.fromkeys([host.kind for host in config.fleet_hosts if host.replicas])  # the others only train
    for each in [config_of_kind(config, kind) for kind in generating] if config.kinds else [config]:
        _check_replica(each)
    per_gpu = TRAINING_BYTES * config.model.parameters / config.trainer_gpus
    if per_gpu > costs.trainer_gpu.memory_bytes:
        fewest = int(TRAINING_BYTES * config.model.parameters / costs.trainer_gpu.memory_bytes) + 1
        more = " of a larger cluster (cluster.gpus)" if fewest >= config.cluster.gpus and not config.kinds else ""
        raise ConfigError(
            f"training {config.model.parameters / 1e9:.3g}B parameters takes {per_gpu / 1e9:.0f} GB on each of "
            f"{config.trainer_gpus} {costs.trainer_gpu.name} of {costs.trainer_gpu.memory_bytes / 1e9:.0f} GB; "
            f"give the trainer at least {fewest} GPUs{more} (split.trainer_gpus)"
        )


def config_of_kind(config: Config, kind: GpuKind) -> Config:
    """As a replica of one of several kinds of card sees it: the fleet is the same, but its own card is this one."""
    cluster = msgspec.structs.replace(config.cluster, gpu=kind.name, gpus_per_host=kind.gpus_per_host)
    split = msgspec.structs.replace(config.split, tensor_parallel=kind.ways)
    return msgspec.structs.replace(config, cluster=cluster, split=split)


def _check_replica(config: Config) -> None:
    costs, need = CostModel(config), config.workload.prompt_tokens + config.workload.max_completion_tokens
    if costs.kv_capacity < need:
        raise ConfigError(_too_large_to_serve(config, costs, need))


def _check_size(config: Config) -> None:
    replicas, trajectories = config.replicas, config.workload.trajectories_per_step
    if replicas > MOST_REPLICAS:
        raise ConfigError(
            f"{replicas:,} replicas are more than the {MOST_REPLICAS:,} that can be simulated; write fewer cluster.gpus"
        )
    if trajectories > MOST_TRAJECTORIES:
        raise ConfigError(
            f"{trajectories:,} trajectories a step are more than the {MOST_TRAJECTORIES:,} that can be simulated; "
            "write fewer workload.prompts_per_step, or a smaller workload.group_size"
        )


def _check_pool(config: Config) -> None:
    if config.split.colocated:
        raise ConfigError(
            "split.colocated shares GPUs, but [costs] are of processes beside each other; leave one of them out"
        )
    pool = config.rollout.kv_tokens or config.costs.kv_tokens
    need = config.workload.prompt_tokens + config.workload.max_completion_tokens
    if pool < need:
        raise ConfigError(
            f"a KV pool of {pool:,} tokens has no room for one sequence of {need:,} (workload.prompt_tokens + "
            f"max_completion_tokens); write rollout.kv_tokens = {need} or more, or shorter sequences"
        )


def _too_large_to_serve(config: Config, costs: CostModel, need: int) -> str:
    ways = config.split.tensor_parallel
    enough = next((each for each in _possible_ways(config) if _holds(config, costs.gpu, each, need)), 0)
    advice = f"write split.tensor_parallel = {enough} or more" if enough else "take cards with more memory"
    if 0 < enough <= ways and config.rollout.memory:  # with the share of a card that engines usually have
        advice = f"write more than rollout.memory = {config.rollout.memory:g}"
    return (
        f"a replica of {ways} {costs.gpu.name} has no room for {config.model.parameters / 1e9:.3g}B parameters and one "
        f"sequence of {need} tokens; {advice}"
    )


def _possible_ways(config: Config) -> list[int]:
    """What divides the heads and is within a host or whole hosts."""
    heads, host = config.model.heads, config.cluster.gpus_per_host
    return [ways for ways in range(1, heads + 1) if heads % ways == 0 and (ways <= host or ways % host == 0)]


def _holds(config: Config, gpu: Gpu, ways: int, tokens: int) -> bool:
    per_card = gpu.memory_bytes * (COLOCATED_MEMORY if config.colocated else ENGINE_MEMORY) - ENGINE_RESERVE
    return ways * per_card >= config.model.weight_bytes + tokens * kv_bytes_per_token(config, ways)
