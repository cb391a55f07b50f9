"""The native engine: continuous batching over any causal language model that transformers loads.

The rollout worker drives it through `engines/base.py`. The scheduler decides with plain integers what a step computes;
this file carries it out with tensors: one packed row of tokens through the model, logits only where a token is
sampled, one draw for all rows. Weights are replaced in place between steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.engines import attention, scheduler
from tailrace.engines.base import Counters, Finish, Job, Load, Sampled
from tailrace.engines.layout import use_fast_layout
from tailrace.engines.sampling import sample
from tailrace.model.load import end_tokens, load_model, load_tokenizer
from tailrace.types import TrajectoryId, Version

Decode = Callable[[list[int]], str]

ROOFLINE = {"cpu": 8, "cuda": 256}  # weights are read once per step: so many rows cost little more than one
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.85}  # of what is free, for the KV pool
LONGEST_CHARACTER = 4  # bytes, and so at most that many tokens


class NativeEngine:
    def __init__(
        self, model: PreTrainedModel, decode: Decode, eos_ids: Iterable[int], config: Config, seed: int
    ) -> None:
        rollout = config.rollout
        self.version: Version = -1
        self.roofline = rollout.roofline_batch or ROOFLINE.get(model.device.type, 64)
        self._model = model.eval()
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._sampling = config.sampling
        self._seed = seed
        self._context = _context(model)
        use_fast_layout(model)
        shapes = _paged_layers(model)
        blocks = _pool_blocks(config, self._context, attention.bytes_per_token(shapes, model.dtype), model.device)
        self.kv_capacity = blocks * rollout.block_tokens
        self._cache = attention.KVCache(shapes, blocks, rollout.block_tokens, model.dtype, model.device)
        self._scheduler = scheduler.Scheduler(blocks, rollout.block_tokens, rollout.prefill_tokens, rollout.max_running)
        self._counters = Counters()
        self._ended: list[Sampled] = []  # had no room for a single token when they came

    def submit(self, job: Job) -> None:
        end = min(len(job.tokens) + job.max_tokens, self._context)
        if end <= len(job.tokens):
            self._ended.append(Sampled(job.id, (), (), "length"))
            return
        if end > self.kv_capacity:
            raise ConfigError(
                f"a sequence may grow to {end} tokens, but the KV pool holds {self.kv_capacity}; "
                "raise rollout.kv_tokens or lower workload.max_completion_tokens"
            )
        self._scheduler.submit(scheduler.Sequence(job, end))

    def step(self) -> list[Sampled]:
        ended, self._ended = self._ended, []
        plan = self._scheduler.plan()
        if not plan.chunks:
            assert not self._scheduler.waiting, "work is waiting, but none of it can start"
            return ended
        ready = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        tokens, logprobs = self._timed(plan, ready)
        for chunk in plan.chunks:
            self._scheduler.computed(chunk)
        return ended + [self._take(*found) for found in zip(ready, tokens, logprobs, strict=True)]

    def withdraw(self, ids: Iterable[TrajectoryId]) -> list[Job]:
        ids = set(ids)
        self._ended = [ended for ended in self._ended if ended.id not in ids]
        found = [self._scheduler.withdraw(id) for id in sorted(ids)]
        return [Job(s.id, s.group, tuple(s.tokens), s.prompt, s.end - len(s.tokens)) for s in found if s is not None]

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        for id in ids:
            self._scheduler.forget(id)

    def load_weights(self, version: Version, tensors: Mapping[str, Any], keep_kv: bool = False) -> None:
        replace_weights(self._model, tensors)
        self.version = version
        if not keep_kv:
            self._scheduler.drop_kv()

    def load(self) -> Load:
        return self._scheduler.load()

    def counters(self) -> dict[str, float]:
        return self._counters.named()

    def check(self) -> None:
        """Every block of the pool is accounted for. For tests."""
        self._scheduler.check()

    # ------------------------------------------------------------------------------------------ inside a step

    def _timed(self, plan: scheduler.Plan, ready: Sequence[scheduler.Sequence]) -> tuple[list[int], list[float]]:
        began = time.perf_counter()
        computed = self._compute(plan, ready)
        counters = self._counters
        counters.busy_s += time.perf_counter() - began
        counters.steps += 1
        counters.decoded += len(ready)
        counters.kv_read += sum(chunk.end for chunk in plan.chunks)
        counters.prefilled += sum(chunk.length for chunk in plan.chunks) - len(ready)
        return computed

    @torch.inference_mode()
    def _compute(self, plan: scheduler.Plan, ready: Sequence[scheduler.Sequence]) -> tuple[list[int], list[float]]:
        device = self._model.device
        self._cache.copy(plan.copies)
        tokens = [token for c in plan.chunks for token in c.sequence.tokens[c.start : c.end]]
        places = np.concatenate([np.arange(c.start, c.end) for c in plan.chunks])
        last = np.cumsum([c.length for c in plan.chunks]) - 1
        sampled = torch.from_numpy(last[[c.samples for c in plan.chunks]])
        found = self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.from_numpy(places)[None].to(device),
            use_cache=False,
            logits_to_keep=sampled.to(device),
            paged=attention.PagedBatch(self._cache, plan.chunks, device),
        )
        if not ready:
            return [], []
        ids, next_places = [s.id for s in ready], [len(s.tokens) for s in ready]
        return sample(found.logits[0], self._seed, ids, next_places, self._sampling)

    def _take(self, sequence: scheduler.Sequence, token: int, logprob: float) -> Sampled:
        sequence.tokens.append(token)
        finish = self._finish(sequence)
        if finish:
            self._scheduler.finished(sequence)
        return Sampled(sequence.id, (token,), (logprob,), finish)

    def _finish(self, sequence: scheduler.Sequence) -> Finish:
        if sequence.tokens[-1] in self._eos_ids or self._ends_with_stop(sequence):
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.end else ""

    def _ends_with_stop(self, sequence: scheduler.Sequence) -> bool:
        """Whether the newest token completed a stop string. What stood there before it, perhaps from a tool or from
        another engine, does not count."""
        stops = self._sampling.stop
        if not stops:
            return False
        reach = max(len(stop.encode()) for stop in stops) + LONGEST_CHARACTER
        tail = sequence.tokens[max(sequence.prompt, len(sequence.tokens) - reach) :]
        before, after = self._decode(tail[:-1]), self._decode(tail)
        return any(after.count(stop) > before.count(stop) for stop in stops)


def build_engine(config: Config, seed: int) -> NativeEngine:
    """The engine of one replica, with the weights of `model.path`."""
    rollout = config.rollout
    if rollout.threads:
        torch.set_num_threads(rollout.threads)
    tokenizer = load_tokenizer(config.model.path)
    device = rollout.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(config.model.path, rollout.precision, device)

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens))

    return NativeEngine(model, decode, end_tokens(config.model.path, tokenizer), config, seed)


# -------------------------------------------------------------------------------------------------------- weights


def replace_weights(model: PreTrainedModel, tensors: Mapping[str, Any]) -> None:
    """Copy into the parameters where they are: their layout and their ties stay. All names are checked first."""
    state = dict(model.named_parameters(remove_duplicate=False))  # buffers are not trained, so they never change
    names: dict[int, list[str]] = {}  # of one piece of memory: tied weights have several
    for name, target in state.items():
        names.setdefault(target.data_ptr(), []).append(name)
    unknown = next((name for name in tensors if name not in state), None)
    if unknown is not None:
        raise ValueError(f"the new weights have '{unknown}', which this model has not")
    pairs = [_matching(alike, state, tensors) for alike in names.values()]
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def _matching(
    alike: Sequence[str], state: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    given = next((name for name in alike if name in tensors), None)
    if given is None:
        raise ValueError(f"the new weights lack '{alike[0]}'")
    target, source = state[given], torch.as_tensor(tensors[given])
    if target.shape != source.shape:
        wanted, found = list(target.shape), list(source.shape)
        raise ValueError(f"the new weights have '{given}' as {found}, but this model needs {wanted}")
    return target, source


# -------------------------------------------------------------------------------------------------------- the pool


def _context(model: PreTrainedModel) -> int:
    """The most tokens that a sequence may have; without a limit for models that name none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _paged_layers(model: PreTrainedModel) -> dict[int, attention.LayerShape]:
    config = model.config.get_text_config()
    shapes = attention.use_paged_attention(model)
    if len(shapes) < config.num_hidden_layers or getattr(config, "attention_chunk_size", None):
        raise ConfigError(
            f"{type(model).__name__} has layers that the native engine cannot page; "
            "model.path must name a model with full or sliding-window attention in every layer"
        )
    return shapes


def _pool_blocks(config: Config, context: int, token_bytes: int, device: torch.device) -> int:
    """Blocks in the pool: as set, or as many as memory allows and the running sequences can fill."""
    longest = min(context, config.workload.prompt_tokens + config.workload.max_completion_tokens)
    size = config.rollout.block_tokens
    wanted = -(-longest // size)
    if config.rollout.kv_tokens:
        blocks, reason = config.rollout.kv_tokens // size, "raise rollout.kv_tokens"
    else:
        room = _free_bytes(device) * MEMORY_SHARE.get(device.type, 0.5) / config.local.replicas
        blocks = min(int(room / (token_bytes * size)), wanted * config.rollout.max_running)
        reason = "memory allows no more, so lower local.replicas"
    if blocks < wanted:
        raise ConfigError(
            f"the KV pool holds {blocks * size} tokens, but one sequence (workload.prompt_tokens + "
            f"workload.max_completion_tokens) can take {longest}; {reason} or lower workload.max_completion_tokens"
        )
    return blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
