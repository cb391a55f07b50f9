"""The native engine: continuous batching over any causal language model that transformers loads.

The rollout worker drives it through `engines/base.py`. The scheduler decides with plain integers what a step computes;
an executor carries it out with tensors; this file hands out what came of it. Weights are replaced in place between
steps.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tailrace.config.dealing import TO_ITSELF
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.engines import attention, scheduler
from tailrace.engines.base import Counters, EngineStats, Finish, Job, StepOutput
from tailrace.engines.compiled import CompiledOperations
from tailrace.engines.eager import NOTHING_DRAWN, Drawn, EagerExecutor
from tailrace.engines.kv import KVCache, bytes_per_token
from tailrace.engines.layout import use_fast_layout
from tailrace.engines.llama_decoder import is_known, llama_decoder
from tailrace.engines.plain import PlainOperations
from tailrace.engines.rescoring import Rescoring
from tailrace.engines.round_trips import RoundTrips
from tailrace.engines.shortage import carry_out
from tailrace.engines.stops import Decode, StopStrings
from tailrace.engines.trial import try_out
from tailrace.kernels import cpu
from tailrace.model.device import AMPERE, usable_device
from tailrace.model.load import end_tokens, load_model, load_tokenizer, precision_on
from tailrace.model.longrope import rotate_by_sequence, switch_of
from tailrace.model.memory import ran_out
from tailrace.model.support import check_layers, refuse
from tailrace.types import TrajectoryId, Version
from tailrace.weights.staging import StagedWeights, replace_weights, staging_for

if TYPE_CHECKING:
    from tailrace.engines.graphs import GraphExecutor

log = logging.getLogger(__name__)

PREFILL = {"cpu": 512, "cuda": 16384}  # tokens in one step
ROOFLINE = {"cpu": 8, "cuda": 256}  # weights are read once per step: so many rows cost little more than one
CPU_SHARE = 0.5  # of the free memory, for the KV pools
NO_KERNELS = "no fused kernels on this GPU (they need compute capability 8.0 and Triton): it runs without them, slower"
NO_ROOM = (
    "{device} has no memory for the KV pool and the buffers of a step beside the weights; lower rollout.kv_tokens, "
    "rollout.memory or rollout.max_running, or end what else runs there"
)


class NativeEngine:
    def __init__(
        self,
        model: PreTrainedModel,
        decode: Decode,
        eos_ids: Iterable[int],
        config: Config,
        seed: int,
        memory: float = 0.0,
    ) -> None:
        """`memory`: its share of the GPU, as dealt; 0: it has the card to itself."""
        rollout = config.rollout
        self.version: Version = -1
        self.roofline = rollout.roofline_batch or ROOFLINE.get(model.device.type, 64)
        self._model = model.eval()
        self._stops = StopStrings(config.sampling.stop, decode)
        self._eos_ids = frozenset(eos_ids)
        self._context = _context(model)
        shapes = _paged_layers(model)
        operations = _plain_operations(model, shapes)
        use_fast_layout(model, column_major=model.device.type == "cpu" and type(operations) is PlainOperations)
        blocks = _pool_blocks(config, self._context, bytes_per_token(shapes, model.dtype), model.device, memory)
        self.kv_capacity = blocks * rollout.block_tokens
        self._cache = KVCache(shapes, blocks, rollout.block_tokens, model.dtype, model.device)
        self._executor = self._build_executor(shapes, operations, self._cache, config, seed)
        self._rescoring = cache(partial(self._build_rescoring, shapes, config, seed))
        prefill = rollout.prefill_tokens or PREFILL.get(model.device.type, 512)
        switch = switch_of(model) or sys.maxsize
        self._scheduler = scheduler.Scheduler(blocks, rollout.block_tokens, prefill, rollout.max_running, switch)
        self._round_trips = RoundTrips(self._executor.steps)
        self._counters = Counters()
        self._full: list[TrajectoryId] = []  # had no room for a single token when they came
        self.staging = staging_for(model)

    def _build_executor(
        self,
        shapes: dict[int, attention.LayerShape],
        plain: PlainOperations,
        cache: KVCache,
        config: Config,
        seed: int,
    ) -> EagerExecutor | GraphExecutor:
        longest = min(self._context, self.kv_capacity)
        if not has_kernels(self._model.device):
            if self._model.device.type == "cuda":
                log.warning(NO_KERNELS)
            decoder = llama_decoder(self._model, shapes, plain)
            return EagerExecutor(self._model, decoder, plain, cache, longest, seed, config.sampling)
        from tailrace.engines.fused import FusedOperations
        from tailrace.engines.graphs import GraphExecutor

        decoder = llama_decoder(self._model, shapes, FusedOperations())
        if decoder is None:
            log.warning("%s has no fused form here: it runs as a module, slower", type(self._model).__name__)
            return EagerExecutor(self._model, None, plain, cache, longest, seed, config.sampling)
        most = config.rollout.max_running
        device = self._model.device
        executor = GraphExecutor(decoder, cache, longest, seed, config.sampling, self._eos_ids, most, device)
        if device.type == "cuda":
            executor.warm_up()
        return executor

    def _build_rescoring(self, shapes: dict[int, attention.LayerShape], config: Config, seed: int) -> Rescoring:
        operations, switch = _plain_operations(self._model, shapes), switch_of(self._model) or sys.maxsize
        return Rescoring(self._model, shapes, operations, config, seed, switch)

    def complaint_about(self, job: Job, logprobs: NDArray[np.float32], draws: bool) -> str:
        """See `base.Checking`."""
        sequence = scheduler.Sequence(job, min(job.prompt_tokens + job.max_tokens, self._context))
        if self._has_ended_before(sequence, draws):
            return "it goes on after the end of its turn"
        if len(sequence.tokens) > sequence.end or not self._is_complete(sequence):
            return "it is not complete: neither a stop nor its greatest length is reached"
        return self._rescoring().complaint_about(job, logprobs) if draws else ""

    def _has_ended_before(self, sequence: scheduler.Sequence, strings: bool) -> bool:
        """Before its last token: by a stop token or, as far as that is looked for, by a stop string."""
        tokens, prompt = sequence.tokens, sequence.prompt
        if not self._eos_ids.isdisjoint(tokens[prompt:-1]):
            return True
        ends = range(prompt + 1, len(tokens)) if strings and self._stops else ()
        return any(self._stops.completed(tokens[:end], prompt) for end in ends)

    def _is_complete(self, sequence: scheduler.Sequence) -> bool:
        if len(sequence.tokens) >= sequence.end:
            return True
        return len(sequence.tokens) > sequence.prompt and bool(self._finish(sequence))

    def submit(self, job: Job) -> None:
        end = min(job.length + job.max_tokens, self._context)
        if end <= job.length:
            self._full.append(job.id)
            return
        if end > self.kv_capacity:
            raise ConfigError(
                f"a sequence may grow to {end} tokens, but the KV pool holds {self.kv_capacity}; "
                "raise rollout.kv_tokens or lower workload.max_completion_tokens"
            )
        self._scheduler.submit(scheduler.Sequence(job, end))

    def step(self) -> StepOutput:
        plan = self._scheduler.plan(self._round_trips.steps)
        if not plan.chunks:
            assert not self._scheduler.waiting, "work is waiting, but none of it can start"
            return self._output(NOTHING_DRAWN)
        plan, drawn = self._timed(plan)
        for chunk in plan.chunks:
            self._scheduler.computed(chunk)
        return self._output(drawn)

    def withdraw(self, ids: Iterable[TrajectoryId]) -> list[Job]:
        ids = set(ids)
        self._full = [id for id in self._full if id not in ids]
        found = [self._scheduler.withdraw(id) for id in sorted(ids)]
        return [_job_so_far(sequence) for sequence in found if sequence is not None]

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        for id in ids:
            self._scheduler.forget(id)

    def load_weights(self, version: Version, tensors: Mapping[str, Any] | StagedWeights, keep_kv: bool = False) -> None:
        replace_weights(self._model, tensors)
        self.version = version
        if not keep_kv:
            self._scheduler.drop_kv()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def counters(self) -> dict[str, float]:
        return self._counters.named()

    def check(self) -> None:
        """Every block of the pool is accounted for. For tests."""
        self._scheduler.check()

    # ------------------------------------------------------------------------------------------ inside a step

    def _timed(self, plan: scheduler.BatchPlan) -> tuple[scheduler.BatchPlan, Drawn]:
        began = time.perf_counter()
        plan, drawn = carry_out(plan, self._executor, self._cache, self._scheduler)
        ends = {chunk.sequence.id: chunk.end for chunk in plan.chunks}
        counters = self._counters
        counters.busy_s += time.perf_counter() - began
        counters.steps += max(drawn.counts, default=0)
        counters.decoded += len(drawn.tokens)
        for sequence, count in zip(drawn.sequences, drawn.counts, strict=True):
            counters.kv_read += count * ends[sequence.id] + count * (count - 1) // 2
        counters.prefilled += sum(chunk.length for chunk in plan.chunks) - len(drawn.sequences)
        return plan, drawn

    def _output(self, drawn: Drawn) -> StepOutput:
        """Hand out what was drawn, and who had no room to begin with."""
        full, self._full = self._full, []
        tokens, at = drawn.tokens.tolist(), 0
        ids, counts = [*full], [0] * len(full)
        finish: list[Finish] = ["length"] * len(full)
        for sequence, count in zip(drawn.sequences, drawn.counts, strict=True):
            taken, ended = self._take(sequence, tokens[at : at + count])
            at += count
            ids.append(sequence.id)
            counts.append(taken)
            finish.append(ended)
        self._round_trips.note(sum(counts), len(finish) - finish.count(""))
        return StepOutput(ids, counts, *_first_of_each(drawn, counts[len(full) :]), finish)

    def _take(self, sequence: scheduler.Sequence, tokens: list[int]) -> tuple[int, Finish]:
        """Let it grow, up to a stop string: after that an executor of many steps went on in vain."""
        finish: Finish = ""
        at_once = 1 if self._stops else len(tokens)  # it stops by itself at a stop token
        taken = 0
        while not finish and taken < len(tokens):
            self._scheduler.grew(sequence, tokens[taken : taken + at_once])
            taken += at_once
            finish = self._finish(sequence)
        if finish:
            self._scheduler.finished(sequence)
        return taken, finish

    def _finish(self, sequence: scheduler.Sequence) -> Finish:
        if sequence.tokens[-1] in self._eos_ids or self._stops.completed(sequence.tokens, sequence.prompt):
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.end else ""


def _job_so_far(s: scheduler.Sequence) -> Job:
    return Job(s.id, s.group, s.tokens.tobytes(), s.prompt, s.end - len(s.tokens), s.failures, s.temperature)


def _first_of_each(drawn: Drawn, counts: list[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """So many of each sequence's tokens, and their log-probs."""
    if counts == drawn.counts:
        return drawn.tokens, drawn.logprobs
    nth = np.arange(len(drawn.tokens)) - np.repeat(np.cumsum(drawn.counts) - drawn.counts, drawn.counts)
    kept = nth < np.repeat(counts, drawn.counts)
    return drawn.tokens[kept], drawn.logprobs[kept]


def has_kernels(device: torch.device) -> bool:
    """Whether the fused kernels run there: Ampere or later, and Triton is installed."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE and bool(find_spec("triton"))


def _plain_operations(model: PreTrainedModel, shapes: dict[int, attention.LayerShape]) -> PlainOperations:
    """Without the kernels for a GPU: compiled ones for this CPU where they can compute the model, or torch's own."""
    fits = model.dtype == torch.float32 and all(shape.key_dim <= cpu.MOST_DIM for shape in shapes.values())
    kernels = cpu.library() if model.device.type == "cpu" and fits and is_known(model) else None
    return PlainOperations() if kernels is None else CompiledOperations(kernels)


def build_engine(config: Config, seed: int, memory: float = 0.0) -> NativeEngine:
    """The engine of one replica, with the weights of `model.path` and so much of its GPU."""
    rollout = config.rollout
    if rollout.threads:
        torch.set_num_threads(rollout.threads)
    tokenizer = load_tokenizer(config.model.path)
    device = usable_device("rollout", config)
    model = load_model(config.model.path, precision_on(device, rollout.precision), device)

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens))

    try:
        return NativeEngine(model, decode, end_tokens(config.model.path, tokenizer), config, seed, memory)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise ConfigError(NO_ROOM.format(device=device)) from None


# -------------------------------------------------------------------------------------------------------- the pool


def _context(model: PreTrainedModel) -> int:
    """The most tokens that a sequence may have; without a limit for models that name none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _paged_layers(model: PreTrainedModel) -> dict[int, attention.LayerShape]:
    config = model.config.get_text_config()
    check_layers(model)
    rotate_by_sequence(model)
    shapes = attention.use_paged_attention(model)
    if len(shapes) < config.num_hidden_layers:
        refuse(config.model_type, "it has layers without the attention that the native engine pages")
    if not is_known(model):
        try_out(model, shapes)
    return shapes


def _pool_blocks(config: Config, context: int, token_bytes: int, device: torch.device, memory: float) -> int:
    """Blocks in the pool: as set, or as many as memory allows and the running sequences can fill."""
    longest = min(context, config.workload.prompt_tokens + config.workload.max_completion_tokens)
    size = config.rollout.block_tokens
    wanted = -(-longest // size)
    if config.rollout.kv_tokens:
        blocks, reason = config.rollout.kv_tokens // size, "raise rollout.kv_tokens"
    else:
        on_gpu = device.type == "cuda"
        room = _gpu_room(memory or config.rollout.memory or TO_ITSELF, device) if on_gpu else _host_room(config)
        blocks = min(int(max(room, 0) / (token_bytes * size)), wanted * config.rollout.max_running)
        reason = _how_to_get_more(config, device)
    if blocks < wanted:
        raise ConfigError(
            f"the KV pool holds {blocks * size} tokens, but one sequence (workload.prompt_tokens + "
            f"workload.max_completion_tokens) can take {longest}; {reason} or lower workload.max_completion_tokens"
        )
    return blocks


def _how_to_get_more(config: Config, device: torch.device) -> str:
    fewer = "lower local.replicas, " if config.local.replicas > 1 else ""
    return f"memory allows no more, so {fewer}{'raise rollout.memory' if device.type == 'cuda' else 'free some of it'}"


def _gpu_room(share: float, device: torch.device) -> float:
    """What this replica may take of its card, less what its weights hold, and those that come after them: they are
    staged on the card, unless that would take more than half of the rest."""
    free, total = torch.cuda.mem_get_info(device)
    held, cached = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    beside = share * total - held
    if beside <= 0:
        raise ConfigError(
            f"the weights take {held / 1e9:.1f} GB, but a replica has only {share * total / 1e9:.1f} GB of the GPU's "
            f"{total / 1e9:.1f} ({100 * share:.0f} %); raise rollout.memory, lower local.replicas, or use a smaller "
            "model or a larger GPU"
        )
    return min(beside - min(held, beside / 2), (free + cached - held) * TO_ITSELF)


def _host_room(config: Config) -> float:
    """Replicas of this machine share its memory. Where other machines bring them all, this is an evaluation."""
    return _free_bytes() * CPU_SHARE / max(1, config.local.replicas)


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
