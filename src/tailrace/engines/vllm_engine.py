"""vLLM as a replica's engine: the contract of `engines/base.py`, kept by a vLLM process of its own.

The rollout worker drives it like any engine; `vllm_link.py` has the process. vLLM generates on its own, so a step is
whatever has arrived since the last one. Requests have numbers that are used once: what still arrives of one that was
withdrawn is dropped, and nobody waits for vLLM to hear of it. New weights end all requests in vLLM; they are submitted
again with every token so far, and compute their KV anew unless it may be kept.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.config.dealing import TO_ITSELF
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.engines.base import Counters, EngineStats, Finish, Job, StepOutput
from tailrace.engines.stops import Decode, StopStrings
from tailrace.engines.vllm_link import VllmLostError, VllmProcess
from tailrace.engines.vllm_process import vllm_messages as words
from tailrace.types import TrajectoryId, Version
from tailrace.weights.layout import WeightLayout
from tailrace.weights.region import MappedVersion
from tailrace.weights.shared_memory import default_base

log = logging.getLogger(__name__)

STREAM_INTERVAL = 8  # tokens of a sequence that vLLM hands over at once: each handing over costs its one Python loop
WAIT_S = 0.02  # a step without news takes no longer
FINISHES: tuple[Finish, ...] = ("", "stop", "length")  # by the numbers in a message
ROOFLINE = {"cpu": 8}
ROOFLINE_OF_A_GPU = 256


class VllmSequence:
    """A job on its way: `tokens` is all that vLLM has said of it, of which the first `handed` have been handed out."""

    __slots__ = ("ended", "gone", "handed", "job", "limit", "tokens")

    def __init__(self, job: Job, limit: int) -> None:
        self.job = job
        self.limit = limit
        self.tokens = array("i", bytes(job.tokens))
        self.handed = len(self.tokens)
        self.ended = False  # in vLLM, though perhaps not handed out yet
        self.gone = False  # withdrawn

    def so_far(self) -> Job:
        job = self.job
        tokens = self.tokens[: self.handed].tobytes()
        return Job(job.id, job.group, tokens, job.prompt_tokens, self.limit - self.handed, job.failures)


class SequenceGrowth(NamedTuple):
    """Where in a message the new tokens of a sequence are, and why it has ended."""

    sequence: VllmSequence
    start: int
    length: int
    finish: Finish


class ReceivedTokens(NamedTuple):
    """What one message added, and to whom; waits to be handed out by a step."""

    growths: list[SequenceGrowth]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version: Version


class VllmEngine:
    def __init__(self, process: VllmProcess, ready: words.EngineReady, decode: Decode, config: Config) -> None:
        self.version: Version = -1
        self.kv_capacity = ready.kv_capacity
        self.roofline = config.rollout.roofline_batch or ROOFLINE.get(ready.device, ROOFLINE_OF_A_GPU)
        self.process = process
        self._context = ready.context
        self._load_within_s = config.health.stuck_s
        self._stops = StopStrings(config.sampling.stop, decode)
        self._number = 0
        self._generating: dict[int, VllmSequence] = {}  # by their numbers in vLLM
        self._sequences: dict[TrajectoryId, VllmSequence] = {}  # until their end is handed out
        self._received: deque[ReceivedTokens] = deque()
        self._totals = words.EngineTotals()
        self._loads, self._load_s = 0, 0.0

    # --------------------------------------------------------------------------------------------------- the contract

    def submit(self, job: Job) -> None:
        limit = min(job.length + job.max_tokens, self._context)
        if limit > self.kv_capacity:
            raise ConfigError(
                f"a sequence may grow to {limit} tokens, but the KV cache holds {self.kv_capacity}; "
                "raise rollout.kv_tokens or lower workload.max_completion_tokens"
            )
        sequence = VllmSequence(job, limit)
        self._sequences[job.id] = sequence
        if limit <= job.length:
            self._received.append(_no_room_for(sequence, self.version))
        else:
            self._begin([sequence])

    def step(self) -> StepOutput:
        if self._sequences:
            self._hear(0.0 if self._received else WAIT_S)
        if not self._received:
            return StepOutput([], [], np.empty(0, np.int32), np.empty(0, np.float32), [])
        return self._hand_out(self._received.popleft())

    def withdraw(self, ids: Iterable[TrajectoryId]) -> list[Job]:
        found = [self._sequences.pop(id) for id in set(ids) if id in self._sequences]
        for sequence in found:
            sequence.gone = True
        self._abort(found)
        return [sequence.so_far() for sequence in found]

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """vLLM keeps what its prefix cache has room for, and asks nobody."""

    def load_weights(self, version: Version, tensors: Mapping[str, Any] | MappedVersion, keep_kv: bool = False) -> None:
        began = time.monotonic()
        if isinstance(tensors, MappedVersion):
            loaded = self._load(version, tensors.path, keep_kv)
        else:
            loaded = self._load_written(version, tensors, keep_kv)
        if not self._loads:
            log.info("vLLM took the weights in %.2f s; all %d tensors were read back", loaded.seconds, loaded.tensors)
        self.version = version
        self._loads += 1
        self._load_s += time.monotonic() - began
        self._generating.clear()
        self._begin([one for one in self._sequences.values() if not one.ended])

    def stats(self) -> EngineStats:
        if not self._sequences:
            return EngineStats(0, 0, 0)  # vLLM may not have heard yet
        waiting = min(self._totals.waiting, len(self._sequences))
        return EngineStats(self._totals.kv_tokens, len(self._sequences) - waiting, waiting)

    def counters(self) -> dict[str, float]:
        done = self._totals
        work = (done.busy_s, done.steps, done.decoded, done.kv_read, done.prefilled)
        return Counters(*work, self._load_s, self._loads).named()

    def close(self) -> None:
        self.process.close()

    # -------------------------------------------------------------------------------------------------------- to vLLM

    def _begin(self, sequences: list[VllmSequence]) -> None:
        requests: list[words.PromptRequest] = []
        for sequence in sequences:
            self._number += 1
            self._generating[self._number] = sequence
            room = sequence.limit - len(sequence.tokens)
            tokens, temperature = sequence.tokens.tobytes(), sequence.job.temperature
            requests.append(words.PromptRequest(self._number, tokens, room, temperature))
        if requests:
            self.process.send(words.Submit(requests))

    def _abort(self, sequences: list[VllmSequence]) -> None:
        unwanted = set(map(id, sequences))
        numbers = [number for number, one in self._generating.items() if id(one) in unwanted]
        for number in numbers:
            del self._generating[number]
        if numbers:
            self.process.send(words.Abort(numbers))

    def _load(self, version: Version, path: Path, keep_kv: bool) -> words.Loaded:
        self.process.send(words.Load(version, str(path), keep_kv))
        what = f"load version {version}"
        loaded, before = self.process.wait_for(words.Loaded, what, self._load_within_s)
        self._take_all(before)  # of the weights before
        return loaded

    def _load_written(self, version: Version, tensors: Mapping[str, Any], keep_kv: bool) -> words.Loaded:
        """Weights that lie in no file yet."""
        with tempfile.NamedTemporaryFile(dir=default_base(), prefix="tailrace-weights-") as file:
            _write(file, tensors)
            return self._load(version, Path(file.name), keep_kv)

    # ------------------------------------------------------------------------------------------------------ from vLLM

    def _hear(self, timeout_s: float) -> None:
        self._take_all(self.process.receive(timeout_s))

    def _take_all(self, messages: Iterable[words.FromVllm]) -> None:
        for message in messages:
            if isinstance(message, words.Sampled):
                self._totals = message.totals
                self._received.append(self._take(message))

    def _take(self, sampled: words.Sampled) -> ReceivedTokens:
        """What is of nobody any more is left out."""
        tokens, logprobs = np.frombuffer(sampled.tokens, "<i4"), np.frombuffer(sampled.logprobs, "<f4")
        growths: list[SequenceGrowth] = []
        start = 0
        for number, count, ended in zip(sampled.numbers, sampled.counts, sampled.ended, strict=True):
            sequence = self._generating.get(number)
            if sequence is not None:
                taken, finish = self._grow(sequence, tokens[start : start + count], FINISHES[ended])
                growths.append(SequenceGrowth(sequence, start, taken, finish))
                if finish:
                    self._see_end(number, in_vllm=bool(ended))
            start += count
        return ReceivedTokens(growths, tokens, logprobs, self.version)

    def _grow(self, sequence: VllmSequence, tokens: NDArray[np.int32], finish: Finish) -> tuple[int, Finish]:
        """How many of them it takes: all, or those up to a stop string, after which vLLM went on in vain."""
        if not self._stops:
            sequence.tokens.frombytes(tokens.tobytes())
            return len(tokens), finish
        for taken, token in enumerate(tokens.tolist(), 1):
            sequence.tokens.append(token)
            if self._stops.completed(sequence.tokens, sequence.job.prompt_tokens):
                return taken, "stop"
        return len(tokens), finish

    def _see_end(self, number: int, in_vllm: bool) -> None:
        self._generating.pop(number).ended = True
        if not in_vllm:
            self.process.send(words.Abort([number]))

    def _hand_out(self, received: ReceivedTokens) -> StepOutput:
        growths = [one for one in received.growths if not one.sequence.gone]
        for growth in growths:
            growth.sequence.handed += growth.length
            if growth.finish:
                del self._sequences[growth.sequence.job.id]
        tokens, logprobs = received.tokens, received.logprobs
        if sum(one.length for one in growths) < len(tokens):
            kept = [np.arange(one.start, one.start + one.length) for one in growths]
            chosen = np.concatenate(kept) if kept else np.empty(0, np.int64)
            tokens, logprobs = tokens[chosen], logprobs[chosen]
        ids, counts = [one.sequence.job.id for one in growths], [one.length for one in growths]
        return StepOutput(ids, counts, tokens, logprobs, [one.finish for one in growths], received.version)


def _no_room_for(sequence: VllmSequence, version: Version) -> ReceivedTokens:
    sequence.ended = True
    return ReceivedTokens(
        [SequenceGrowth(sequence, 0, 0, "length")], np.empty(0, np.int32), np.empty(0, np.float32), version
    )


def _write(file: IO[bytes], tensors: Mapping[str, Any]) -> None:
    layout = WeightLayout.of_tensors(tensors)
    file.truncate(layout.size)
    whole = np.memmap(file.name, np.uint8, "r+", shape=(layout.size,))
    whole[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
    for name, view in layout.views(whole.data).items():
        view.copy_(tensors[name])
    whole.flush()


# ------------------------------------------------------------------------------------------------------------- starting


def build_engine(config: Config, memory: float = 0.0, with_weights: bool = False) -> VllmEngine:
    """`memory`: its share of its cards; 0: it has them to itself. `with_weights`: those of `model.path`; else it has
    none that mean anything until a version comes."""
    from tailrace.model.load import end_tokens, load_tokenizer

    path = config.model.path
    tokenizer = load_tokenizer(path)
    stop_tokens = end_tokens(path, tokenizer)
    process = VllmProcess(config.rollout.python)
    try:
        process.send(_start(config, stop_tokens, memory, with_weights))
        ready, _ = process.wait_for(words.EngineReady, "start", config.local.start_s)
    except VllmLostError as error:
        process.close()
        raise ConfigError(f"vLLM cannot start: {error}; what it wrote before that, in the log, says more") from None
    log.info("vLLM %s on %s, KV cache of %d tokens", ready.vllm, ready.device, ready.kv_capacity)
    return VllmEngine(process, ready, lambda tokens: str(tokenizer.decode(tokens)), config)


def _start(config: Config, stop_tokens: Iterable[int], memory: float, with_weights: bool) -> words.StartEngine:
    from tailrace.model.load import model_folder

    rollout, sampling = config.rollout, config.sampling
    arguments: dict[str, Any] = {
        "model": str(model_folder(config.model.path)),
        "load_format": "auto" if with_weights else "dummy",
        "max_num_seqs": rollout.max_running,
        "max_model_len": -1,  # the model's, or what fits into memory
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "vllm_weights.VersionLoader",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "stream_interval": STREAM_INTERVAL,
        "seed": secrets.randbits(31),  # with the same one, replicas would draw the same answers to a prompt
    }
    if rollout.precision:
        arguments["dtype"] = rollout.precision
    if rollout.prefill_tokens:
        arguments["max_num_batched_tokens"] = rollout.prefill_tokens
    drawing: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return words.StartEngine(
        arguments | rollout.vllm,
        drawing | {"stop_token_ids": sorted(stop_tokens)},
        rollout.kv_tokens,
        *_memory(config, memory),
    )


def _memory(config: Config, dealt: float) -> tuple[float, float]:
    """The share of a card's memory, and of the host's, that one replica may take."""
    wanted, replicas = config.rollout.memory, 1 if config.local.is_auto else max(1, config.local.replicas)
    return dealt or wanted or TO_ITSELF, (wanted or _free_share() / 2) / replicas


def _free_share() -> float:
    """The part of the host's memory that is free: on a CPU vLLM refuses to start where it cannot have its share."""
    figures = {line.split()[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    return figures["MemAvailable:"] / figures["MemTotal:"]
