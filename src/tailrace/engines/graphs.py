"""Computes a scheduler's plan on a GPU: many decode steps per round trip, each of them one CUDA graph.

A graph holds a whole step, from the embedding to the sampled token and its log-prob, for a fixed number of rows. The
state of every row (its newest token, its length, where it must stop) lies on the device and is moved on by the graph
itself, so the host launches as many steps as it likes, then reads back all that was sampled. Meanwhile prompts are
prefilled on a stream of their own; they join at the next round trip.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailrace.config.tree import Sampling
from tailrace.engines import scheduler
from tailrace.engines.eager import NOTHING_DRAWN, Drawn, by_temperature, planned_tokens, sampling_at
from tailrace.engines.fused import DecodeAttention, PrefillAttention, Stored
from tailrace.engines.kv import KVCache
from tailrace.engines.llama_decoder import LlamaDecoder
from tailrace.engines.sampling import allowed_scores
from tailrace.kernels.decode import splits_for
from tailrace.kernels.draw import draw

STEPS = 32  # per round trip: a sequence that ends in between idles to the end of it
LEAST_LONG = 1024  # rows up to this length are all treated alike
IDLE_ROW = [[0], [1], [0], [0]]  # past its limit from the start
IDLE = -1  # in place of a token: this row had nothing to do


def buckets(most: int) -> list[int]:
    """Numbers of rows for which there is a graph: four between two powers of two, so that few rows are idle."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < most:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(16, power // 4))
    return [size for size in sizes if size < most] + [most]


class Rows:
    """The state of the decoding rows, on the device and as it is sent there: the newest token, the length, the length
    at which to stop, the stream of random numbers; and the blocks."""

    def __init__(self, most: int, blocks: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._sent = torch.zeros(4, most, dtype=torch.int64, pin_memory=pinned)
        self._sent_table = torch.zeros(most, blocks, dtype=torch.int32, pin_memory=pinned)
        self.numbers = torch.tensor(IDLE_ROW, device=device).repeat(1, most)
        self.table = torch.zeros(most, blocks, dtype=torch.int32, device=device)

    def rest(self) -> None:
        """Nothing to do for any row."""
        self.numbers.copy_(torch.tensor(IDLE_ROW))

    def send(self, sequences: Sequence[scheduler.Sequence], limits: Sequence[int], rows: int) -> None:
        numbers, table = self._sent.numpy(), self._sent_table.numpy()
        numbers[:, :rows] = IDLE_ROW
        columns = [[s.tokens[-1] for s in sequences], [len(s.tokens) for s in sequences], limits]
        numbers[:, : len(sequences)] = [*columns, [s.stream for s in sequences]]
        for row, sequence in zip(table, sequences, strict=False):
            row[: len(sequence.blocks)] = sequence.blocks
        self.numbers[:, :rows].copy_(self._sent[:, :rows], non_blocking=True)
        self.table[:rows].copy_(self._sent_table[:rows], non_blocking=True)


class GraphExecutor:
    steps = STEPS

    def __init__(
        self,
        decoder: LlamaDecoder,
        cache: KVCache,
        longest: int,
        seed: int,
        sampling: Sampling,
        stops: Iterable[int],
        most: int,
        device: torch.device,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self._seed, self._sampling = seed, sampling
        self._drawing = sampling  # at the temperature of what is being drawn
        self._device = device
        self._longest = longest
        self._rotations = decoder.rotations(longest)
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
        self._rows = Rows(most, -(-longest // cache.block_tokens), device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(STEPS, most, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(STEPS, most, dtype=torch.float32, device=device)
        self._prefill_stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buckets = buckets(most)
        self._graphs: dict[tuple[int, int, float], Callable[[], None]] = {}
        self._capture = Capture(device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if self._prefill_stream else 1

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs of short contexts at once, rather than in the middle of a run."""
        for rows in reversed(self._buckets):  # the largest first: the others fit into its memory
            self._graph(rows, self._splits(rows, 1))

    @torch.inference_mode()
    def run(self, plan: scheduler.BatchPlan) -> Drawn:
        """What is drawn at one temperature together: a graph has one."""
        kinds = by_temperature([chunk.sequence for chunk in plan.chunks])
        drawn = [self._run_at(plan._replace(chunks=[plan.chunks[i] for i in rows]), t) for t, rows in kinds.items()]
        return reduce(_joined, drawn)

    def _run_at(self, plan: scheduler.BatchPlan, temperature: float | None) -> Drawn:
        self._drawing = sampling_at(self._sampling, temperature)
        decoding = [chunk.sequence for chunk in plan.chunks if chunk.length == 1 and chunk.samples]
        prefilling = [chunk for chunk in plan.chunks if not (chunk.length == 1 and chunk.samples)]
        ready = torch.cuda.current_stream().record_event() if self._prefill_stream else None
        steps = self._launch_decode(decoding, plan.steps) if decoding else 0
        first = self._launch_prefill(prefilling, ready) if prefilling else None
        drawn = self._read_decode(decoding, steps) if decoding else NOTHING_DRAWN
        return drawn if first is None else _joined(drawn, self._read_first(prefilling, *first))

    # ------------------------------------------------------------------------------------------ decoding

    def _launch_decode(self, sequences: Sequence[scheduler.Sequence], most: int) -> int:
        slots = self._cache.block_tokens
        limits = [min(s.end, len(s.blocks) * slots + 1) for s in sequences]
        steps = min(most, max(limit - len(s.tokens) for s, limit in zip(sequences, limits, strict=True)))
        rows = self._buckets[bisect_left(self._buckets, len(sequences))]
        replay = self._graph(rows, self._splits(rows, max(limits)))
        self._rows.send(sequences, limits, rows)
        self._step.zero_()
        for _ in range(steps):
            replay()
        return steps

    def _graph(self, rows: int, splits: int) -> Callable[[], None]:
        key = (rows, splits, self._drawing.temperature)
        if key not in self._graphs:
            self._rows.rest()  # capturing runs a step, which must change nothing
            self._graphs[key] = self._capture(partial(self._decode_step, rows, splits))
        return self._graphs[key]

    def _splits(self, rows: int, longest: int) -> int:
        """Over how many programs a row's attention is spread: more for longer rows, in few and coarse steps."""
        longest = min(self._longest, max(LEAST_LONG, 2 ** (longest - 1).bit_length()))
        return splits_for(rows, self._cache.keys[0].shape[1], longest, self._processors)

    def _read_decode(self, sequences: list[scheduler.Sequence], steps: int) -> Drawn:
        self._wait()
        drawn, logprobs = (each[:steps, : len(sequences)].T.cpu().numpy() for each in (self._drawn, self._logprobs))
        sampled = drawn != IDLE  # a row that has come to its end stays idle
        _refuse_nonsense(logprobs[sampled])
        return Drawn(sequences, sampled.sum(1).tolist(), drawn[sampled].astype(np.int32), logprobs[sampled])

    def _decode_step(self, rows: int, splits: int) -> None:
        """One token for every row, or none for a row at its limit; and all rows moved on."""
        tokens, lengths, limits, ids = self._rows.numbers[:, :rows]
        active = lengths < limits
        stored = self._stored(lengths - 1, active, self._rows.table[:rows])
        attention = DecodeAttention(stored, torch.where(active, lengths, 0).int(), splits)
        drawn, logprobs = self._draw(self._decoder.hidden(tokens, attention), ids, lengths)
        self._drawn[:, :rows].index_copy_(0, self._step, torch.where(active, drawn, IDLE)[None])
        self._logprobs[:, :rows].index_copy_(0, self._step, logprobs[None])
        tokens.copy_(drawn)
        limits.masked_fill_((drawn[:, None] == self._stops).any(1), 0)
        lengths.add_(active)
        self._step.add_(1).remainder_(STEPS)

    def _stored(self, positions: Tensor, kept: Tensor, table: Tensor) -> Stored:
        """For one token of every row of the table."""
        size = self._cache.block_tokens
        blocks = table.gather(1, (positions // size)[:, None])[:, 0].long()
        slots = torch.where(kept, blocks * size + positions % size, -1)
        return Stored(self._cache, self._rotations, positions, slots, table)

    def _draw(self, hidden: Tensor, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        logits, sampling = self._decoder.logits(hidden), self._drawing
        temperature = sampling.temperature
        if temperature and (sampling.top_k > 0 or sampling.top_p < 1):
            logits, temperature = allowed_scores(logits.float(), sampling, may_look=False), 1.0
        return draw(logits, temperature, self._seed, ids, positions)

    # ------------------------------------------------------------------------------------------ prefilling

    def _launch_prefill(self, chunks: Sequence[scheduler.Chunk], ready: Any) -> tuple[Tensor, Tensor]:
        """Beside the decode steps that were launched before it, but after the blocks that it goes on from."""
        stream = self._prefill_stream
        if stream is None:
            return self._prefill(chunks)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            return self._prefill(chunks)

    def _prefill(self, chunks: Sequence[scheduler.Chunk]) -> tuple[Tensor, Tensor]:
        """The token after each chunk and its log-prob, of use where the chunk ends its sequence."""
        size = self._cache.block_tokens
        lengths = np.array([chunk.length for chunk in chunks])
        starts, ends = np.array([chunk.start for chunk in chunks]), np.array([chunk.end for chunk in chunks])
        bounds = np.concatenate([[0], lengths.cumsum()])
        table = np.zeros((len(chunks), -(-int(ends.max()) // size)), np.int32)
        for row, chunk in zip(table, chunks, strict=True):
            count = -(-chunk.end // size)
            row[:count] = chunk.sequence.blocks[:count]
        owner = np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - starts, lengths)
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        streams = np.array([chunk.sequence.stream for chunk in chunks])
        sent = self._send(planned_tokens(chunks), positions, slots, table, starts, ends, bounds, streams)
        tokens_, places_, slots_, table_, starts_, ends_, bounds_, streams_ = sent
        stored = Stored(self._cache, self._rotations, places_, slots_, table_)
        attention = PrefillAttention(stored, starts_, ends_, bounds_, int(lengths.max()))
        hidden = self._decoder.hidden(tokens_, attention).index_select(0, bounds_[1:] - 1)
        return self._draw(hidden, streams_, ends_)

    def _send(self, *arrays: np.ndarray) -> list[Tensor]:
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        return [torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True) for array in arrays]

    def _read_first(self, chunks: Sequence[scheduler.Chunk], tokens: Tensor, logprobs: Tensor) -> Drawn:
        with nullcontext() if self._prefill_stream is None else torch.cuda.stream(self._prefill_stream):
            self._wait()
            found, each = tokens.cpu().numpy(), logprobs.cpu().numpy()
        _refuse_nonsense(each)
        samples = np.array([chunk.samples for chunk in chunks])
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        return Drawn(sequences, [1] * len(sequences), found[samples].astype(np.int32), each[samples])

    def _wait(self) -> None:
        """Until what was launched is done. A copy to pageable memory waits as well, but within the driver, where it
        holds up the threads that copy new weights: a pull took 3 s instead of 0.4."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _joined(one: Drawn, other: Drawn) -> Drawn:
    tokens, logprobs = np.concatenate([one.tokens, other.tokens]), np.concatenate([one.logprobs, other.logprobs])
    return Drawn(one.sequences + other.sequences, one.counts + other.counts, tokens, logprobs)


def _refuse_nonsense(logprobs: np.ndarray) -> None:
    if np.isnan(logprobs).any():
        raise FloatingPointError("the model's logits are not finite: its weights have diverged")


class Capture:
    """Makes a CUDA graph of a step. All share one pool of memory: no two of them ever run at the same time. On a CPU a
    step is simply called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        if self._device.type == "cpu":
            return step
        step()  # whatever is compiled or allocated on first use
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay
