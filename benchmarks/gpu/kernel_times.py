"""Every kernel on a GPU: first checked against float32 references on fresh random inputs, then timed in a CUDA graph.

    PYTHONPATH=src python benchmarks/gpu/kernel_times.py [--sweep] [--seed N] [--out FILE]

Needs torch and triton alone. Prints one table and writes benchmarks/results/gpu_kernels.json. `cold` rotates through
inputs that together exceed the cache many times; `hot` repeats one input, which is how small operations meet their data
in a decode step. Shares of bandwidth are those of the cold time against a copy measured in the same run. `--sweep` also
times other tile sizes, warps and stages of the kernels that have such constants, checking each one's result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tailrace.kernels import decode, draw, gate, norm, prefill, rope

RESULTS = Path(__file__).parent.parent / "results" / "gpu_kernels.json"
CACHE_BYTES = 300e6  # inputs that rotate exceed this: six times the second-level cache of an H200
BLOCK = 16
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-5}
WRAP = 2**64
Call = Callable[[], Any]


class Shape(NamedTuple):
    name: str
    hidden: int
    heads: int
    kv_heads: int
    size: int
    inner: int
    words: int
    layers: int


SHAPES = (
    Shape("1.5B", 1536, 12, 2, 128, 8960, 151936, 28),
    Shape("7B", 3584, 28, 4, 128, 18944, 152064, 28),
)


class Case(NamedTuple):
    kernel: str
    shape: str
    size: str
    calls: list[Call]  # the same work on inputs of their own
    moved: float  # bytes that one call must read and write
    operations: float = 0.0  # multiplications and additions of its matrix products, where they are the limit


# ---------------------------------------------------------------- inputs


def normal(*shape: int, kind: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(kind)


def integers(values: list[int], kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=kind, device=DEVICE)


class Pool(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def pooled(shape: Shape, lengths: list[int], kind: torch.dtype = torch.bfloat16) -> Pool:
    """Random keys and values of sequences whose blocks are scattered over the pool."""
    needed = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(needed) + 7).to(torch.int32)
    table = torch.zeros(len(lengths), max(*needed, 1), dtype=torch.int32)
    begin = 0
    for row, count in enumerate(needed):
        table[row, :count] = blocks[begin : begin + count]
        begin += count
    keys, values = (normal(len(blocks), shape.kv_heads, BLOCK, shape.size, kind=kind) for _ in range(2))
    return Pool(keys, values, table.to(DEVICE), integers(lengths))


def tokens_of(pool: Pool, cells: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """The keys or values of one sequence, [kv heads, tokens, size] in float32."""
    blocks = cells[pool.table[row, : -(-length // BLOCK)].long()].float()
    return blocks.transpose(0, 1).flatten(1, 2)[:, :length]


def tail_lengths(rows: int) -> list[int]:
    """Heavy-tailed: log-normal, from 16 to 8192 tokens."""
    drawn = random.Random(1)
    return [min(max(round(drawn.lognormvariate(5.5, 1.0)), 16), 8192) for _ in range(rows)]


# ---------------------------------------------------------------- references and checks


class Check(NamedTuple):
    kernel: str
    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # a NaN does not pass


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not bool(found.isfinite().all()):
        return math.nan
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def poison(*sizes: int) -> None:
    """Leave NaN in the memory that outputs will be taken from, so that what is not written shows."""
    left = [torch.full((size,), math.nan, device=DEVICE) for size in (*sizes, 1 << 20, 1 << 22)]
    del left


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None, softcap: float | None
) -> torch.Tensor:
    group = q.shape[1] // len(k)
    scores = torch.einsum("thd,hpd->htp", q.float(), k.repeat_interleave(group, 0)) * q.shape[2] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    back = (start + torch.arange(len(q), device=DEVICE))[:, None] - torch.arange(k.shape[1], device=DEVICE)
    scores.masked_fill_((back < 0) | (back >= (window or 1 << 30)), -torch.inf)
    return torch.einsum("htp,hpd->thd", scores.softmax(-1), v.repeat_interleave(group, 0))


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()


def check_norm(shape: Shape, kind: torch.dtype) -> Iterator[Check]:
    x, weight = normal(777, shape.hidden, kind=kind, scale=3.0), normal(shape.hidden, kind=kind)
    poison(x.numel() * x.element_size() // 4)
    yield Check("rms_norm", shape.name, error(norm.rms_norm(x, weight, 1e-6), normed(x, weight)), LIMITS[kind])


def check_gate(shape: Shape, kind: torch.dtype) -> Iterator[Check]:
    x = normal(333, 2 * shape.inner, kind=kind)
    poison(x.numel() * x.element_size() // 8)
    left, right = x.float().chunk(2, -1)
    expected = torch.nn.functional.silu(left) * right
    yield Check("silu_mul", shape.name, error(gate.silu_mul(x), expected), LIMITS[kind])


def angle_tables(places: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(places, device=DEVICE)[:, None] / 1e6 ** (torch.arange(0, size, 2, device=DEVICE) / size)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def check_rope(shape: Shape, kind: torch.dtype, with_norms: bool) -> Iterator[Check]:
    tokens, size = 501, shape.size
    qkv = normal(tokens, (shape.heads + 2 * shape.kv_heads) * size, kind=kind)
    cos, sin = angle_tables(8192, size)
    places = torch.randint(8192, (tokens,), device=DEVICE)
    slots = torch.randperm(64 * BLOCK, device=DEVICE)[:tokens]
    slots[::50] = -1
    keys, values = (torch.zeros(64, shape.kv_heads, BLOCK, size, dtype=kind, device=DEVICE) for _ in range(2))
    norms = [normal(size, kind=kind) if with_norms else None for _ in range(2)]
    q = rope.rope_store(qkv, cos, sin, places, slots, keys, values, norms[0], norms[1], 1e-6)
    parts = qkv.view(tokens, -1, size).split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    pairs = zip(parts[:2], norms, strict=True)
    expected = [part.float() if weight is None else normed(part, weight) for part, weight in pairs]
    expected = [turned(part, cos[places], sin[places]) for part in expected] + [parts[2].float()]
    stored = slots >= 0
    targets = [torch.zeros(64 * BLOCK, shape.kv_heads, size, device=DEVICE) for _ in range(2)]
    for target, part in zip(targets, expected[1:], strict=True):
        target[slots[stored]] = part[stored]
    found = [q, *(cells.transpose(1, 2).reshape(64 * BLOCK, -1, size) for cells in (keys, values))]
    for name, one, other in zip(("q", "k", "v"), found, (expected[0], *targets), strict=True):
        yield Check("rope_store", f"{shape.name} {name}{' normed' * with_norms}", error(one, other), LIMITS[kind])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]


def check_decode(
    shape: Shape, kind: torch.dtype, lengths: list[int], splits: int, window: int | None, softcap: float | None
) -> Iterator[Check]:
    pool = pooled(shape, lengths, kind)
    q = normal(len(lengths), shape.heads, shape.size, kind=kind)
    poison(q.numel() * q.element_size() // 4, q.numel() * splits)
    scale = shape.size**-0.5
    found = decode.paged_decode(q, pool.keys, pool.values, pool.table, pool.lengths, scale, window, softcap, splits)
    expected = torch.zeros_like(q, dtype=torch.float32)
    for row, length in enumerate(lengths):
        if length:
            k, v = (tokens_of(pool, cells, row, length) for cells in (pool.keys, pool.values))
            expected[row] = attended(q[row : row + 1], k, v, length - 1, window, softcap)[0]
    text = f"{shape.name} {len(lengths)} rows to {max(lengths)}, splits {splits}, window {window}, cap {softcap}"
    yield Check("paged_decode", text, error(found, expected), LIMITS[kind])


def check_prefill(
    shape: Shape, kind: torch.dtype, starts: list[int], counts: list[int], window: int | None, softcap: float | None
) -> Iterator[Check]:
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    pool = pooled(shape, lengths, kind)
    q = normal(sum(counts), shape.heads, shape.size, kind=kind)
    poison(q.numel() * q.element_size() // 4)
    found = prefilled(pool, q, starts, counts, window, softcap)
    parts = []
    for row, part in enumerate(q.split(counts)):
        k, v = (tokens_of(pool, cells, row, lengths[row]) for cells in (pool.keys, pool.values))
        parts.append(attended(part, k, v, starts[row], window, softcap))
    text = f"{shape.name} chunks of {counts} after {starts}, window {window}, cap {softcap}"
    yield Check("paged_prefill", text, error(found, torch.cat(parts)), LIMITS[kind])


def prefilled(
    pool: Pool, q: torch.Tensor, starts: list[int], counts: list[int], window: int | None, softcap: float | None
) -> torch.Tensor:
    cu = integers([0, *itertools.accumulate(counts)])
    return prefill.paged_prefill(
        q, pool.keys, pool.values, pool.table, integers(starts), pool.lengths, cu, max(counts),
        q.shape[2] ** -0.5, window, softcap,
    )  # fmt: skip


def number(seed: int, trajectory: int, position: int) -> float:
    """The random number of a place, in Python's integers."""
    state = 0
    for value in (seed, trajectory, position):
        state = (state + value + 0x9E3779B97F4A7C15) % WRAP
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WRAP
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WRAP
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def check_draw(shape: Shape, kind: torch.dtype, rows: int, temperature: float) -> Iterator[Check]:
    logits = normal(rows, shape.words, kind=kind, scale=2.5)
    logits[:, ::97] = -torch.inf
    seed = random.getrandbits(63)
    trajectories = [random.getrandbits(40) for _ in range(rows)]
    positions = [random.randrange(10000) for _ in range(rows)]
    poison(rows, 2 * rows)
    tokens, logprobs = draw.draw(
        logits, temperature, seed, integers(trajectories, torch.int64), integers(positions, torch.int64)
    )
    scores = logits.double() / (temperature or 1.0)
    sums = (scores - scores.amax(-1, keepdim=True)).exp().cumsum(-1)
    numbers = [number(seed, one, other) for one, other in zip(trajectories, positions, strict=True)]
    targets = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)[:, None] * sums[:, -1:]
    expected = torch.searchsorted(sums, targets, right=True)[:, 0] if temperature else scores.argmax(-1)
    text = f"{shape.name} {rows} rows, temperature {temperature}"
    wrong = float((tokens != expected).sum()) if temperature else float((first_of(scores) != tokens).sum())
    yield Check("draw", f"{text}: other tokens", wrong, 1.0 if temperature else 0.0)
    exact = scores.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    yield Check("draw", f"{text}: log-prob", float((logprobs - exact).abs().max()), 2e-5)


def first_of(scores: torch.Tensor) -> torch.Tensor:
    """The lowest index among equal maxima."""
    return (scores == scores.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def ragged(rows: int, longest: int) -> list[int]:
    return [0, 1, 15, 16, 17, longest] + [random.randint(1, longest) for _ in range(rows - 6)]


def checks(shape: Shape, kind: torch.dtype) -> Iterator[Check]:
    """What every type must pass."""
    yield from check_norm(shape, kind)
    yield from check_gate(shape, kind)
    yield from check_rope(shape, kind, False)
    yield from check_decode(shape, kind, ragged(67, 900), 1, None, None)
    yield from check_decode(shape, kind, ragged(67, 900), 4, None, None)
    yield from check_prefill(shape, kind, [0, 5], [random.randint(2, 60), 33], None, None)
    starts, counts = [0, 513, 16, 0, 77], [random.randint(129, 700), 64, 1, 128, random.randint(2, 90)]
    yield from check_prefill(shape, kind, starts, counts, None, None)
    for temperature in (1.0, 0.0):
        yield from check_draw(shape, kind, 64, temperature)


def more_checks(shape: Shape, kind: torch.dtype) -> Iterator[Check]:
    """What the type that is used must pass on top."""
    yield from check_rope(shape, kind, True)
    for splits, window, softcap in ((2, 300, None), (8, None, 20.0), (8, 300, 20.0)):
        yield from check_decode(shape, kind, ragged(67, 900), splits, window, softcap)
    yield from check_decode(shape, kind, ragged(9, 8192), 16, None, None)
    for window, softcap in ((200, None), (None, 20.0), (200, 20.0)):
        starts, counts = [0, 513, 16, 0, 77], [random.randint(129, 700), 64, 1, 128, random.randint(2, 90)]
        yield from check_prefill(shape, kind, starts, counts, window, softcap)
    yield from check_prefill(shape, kind, [random.randint(0, 900)], [2048], None, None)
    yield from check_draw(shape, kind, 256, 0.7)


# ---------------------------------------------------------------- what is timed


def sets(moved: float) -> int:
    return max(2, math.ceil(CACHE_BYTES / moved))


def norm_case(shape: Shape, rows: int) -> Case:
    moved = 2.0 * rows * shape.hidden * 2
    weight = normal(shape.hidden)
    calls = [bound(norm.rms_norm, normal(rows, shape.hidden), weight, 1e-6) for _ in range(sets(moved))]
    return Case("rms_norm", shape.name, f"{rows} rows", calls, moved)


def gate_case(shape: Shape, rows: int) -> Case:
    moved = 3.0 * rows * shape.inner * 2
    calls = [bound(gate.silu_mul, normal(rows, 2 * shape.inner)) for _ in range(sets(moved))]
    return Case("silu_mul", shape.name, f"{rows} rows", calls, moved)


def rope_case(shape: Shape, rows: int) -> Case:
    width = (shape.heads + 2 * shape.kv_heads) * shape.size
    moved = 2.0 * rows * width * 2
    cos, sin = angle_tables(8192, shape.size)
    calls: list[Call] = []
    for _ in range(sets(moved)):
        keys, values = (normal(-(-rows // BLOCK), shape.kv_heads, BLOCK, shape.size) for _ in range(2))
        places, slots = (torch.randperm(max(rows, 1), device=DEVICE) % 8192 for _ in range(2))
        calls.append(
            bound(rope.rope_store, normal(rows, width), cos, sin, places, slots, keys, values, None, None, 1e-6)
        )
    return Case("rope_store", shape.name, f"{rows} rows", calls, moved)


def decode_case(shape: Shape, lengths: list[int], text: str) -> Case:
    moved = 4.0 * sum(lengths) * shape.kv_heads * shape.size + 4.0 * len(lengths) * shape.heads * shape.size
    splits = decode.splits_for(len(lengths), shape.kv_heads, max(lengths), PROCESSORS)
    calls: list[Call] = []
    for _ in range(sets(moved)):
        pool, q = pooled(shape, lengths), normal(len(lengths), shape.heads, shape.size)
        calls.append(bound(decode.paged_decode, q, *pool, shape.size**-0.5, None, None, splits))
    return Case("paged_decode", shape.name, f"{len(lengths)} x {text}, splits {splits}", calls, moved)


def prefill_case(shape: Shape, starts: list[int], counts: list[int], text: str) -> Case:
    seen = sum(count * start + count * (count + 1) / 2 for start, count in zip(starts, counts, strict=True))
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    pool, q = pooled(shape, lengths), normal(sum(counts), shape.heads, shape.size)
    places, cu = integers(starts), integers([0, *itertools.accumulate(counts)])
    call = bound(
        prefill.paged_prefill, q, pool.keys, pool.values, pool.table, places, pool.lengths, cu, max(counts),
        shape.size**-0.5, None, None,
    )  # fmt: skip
    moved = 4.0 * sum(lengths) * shape.kv_heads * shape.size + 4.0 * q.numel()
    return Case("paged_prefill", shape.name, text, [call], moved, 4.0 * seen * shape.heads * shape.size)


def draw_case(shape: Shape, rows: int, temperature: float) -> Case:
    moved = 2.0 * rows * shape.words
    trajectories, positions = (torch.arange(rows, device=DEVICE) for _ in range(2))
    calls = [
        bound(draw.draw, normal(rows, shape.words, scale=2.5), temperature, 7, trajectories, positions)
        for _ in range(sets(moved))
    ]
    return Case("draw", shape.name, f"{rows} rows, temperature {temperature:g}", calls, moved)


def bound(kernel: Callable[..., Any], *inputs: Any) -> Call:
    return lambda: kernel(*inputs)


def copy_case() -> Case:
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_() for _ in range(2))
    return Case("copy", "", "1 GiB", [lambda: target.copy_(source)], 2.0 * (1 << 30))


def cases() -> Iterator[Callable[[], Case]]:
    """Built one after the other, so that one's inputs are gone before the next one's are made."""
    for shape in SHAPES:
        for rows in (64, 256, 8192):
            yield lambda shape=shape, rows=rows: norm_case(shape, rows)
            yield lambda shape=shape, rows=rows: rope_case(shape, rows)
            yield lambda shape=shape, rows=rows: gate_case(shape, rows)
        for rows, context in ((64, 256), (256, 256), (512, 256), (1024, 256), (128, 4096), (16, 8192), (1, 4096)):
            yield lambda shape=shape, rows=rows, context=context: decode_case(
                shape, [context - row % 13 for row in range(rows)], f"{context} tokens"
            )
        yield lambda shape=shape: decode_case(shape, tail_lengths(256), "16 to 8192 tokens, heavy tail")
        yield lambda shape=shape: prefill_case(shape, [0] * 64, [128] * 64, "64 x 128 tokens")
        yield lambda shape=shape: prefill_case(shape, [0] * 2, [4096] * 2, "2 x 4096 tokens")
        yield lambda shape=shape: prefill_case(shape, [4096], [4096], "4096 tokens after 4096")
        for rows, temperature in ((64, 1.0), (256, 1.0), (256, 0.0), (1024, 1.0)):
            yield lambda shape=shape, rows=rows, heat=temperature: draw_case(shape, rows, heat)


def microseconds(calls: list[Call]) -> float:
    """One call's time: the median over replays of a graph that makes all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(15):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        if replay >= 3:
            times.append(before.elapsed_time(after))
    return 1000 * statistics.median(times) / len(calls)


def measured(case: Case) -> dict[str, Any]:
    cold = microseconds(case.calls * max(1, 20 // len(case.calls)))
    hot = microseconds(case.calls[:1] * 40)
    row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "size": case.size}
    row |= {"cold_us": round(cold, 2), "hot_us": round(hot, 2), "gb_per_s": round(case.moved / cold / 1e3)}
    if case.operations:
        row["tflop_per_s"] = round(case.operations / cold / 1e6, 1)
    return row


# ---------------------------------------------------------------- other constants


SWEEPS: list[tuple[ModuleType, tuple[str, ...], list[tuple[int, ...]]]] = [
    (
        decode,
        ("TILE", "WARPS", "STAGES"),
        [(32, 4, 5), (32, 4, 3), (32, 4, 7), (64, 4, 3), (64, 4, 5), (64, 8, 5), (32, 2, 5), (32, 1, 5), (64, 2, 5),
         (16, 2, 7), (128, 8, 3)],
    ),
    (
        prefill,
        ("QUERIES", "TILE", "WARPS", "STAGES"),
        [(128, 64, 8, 3), (128, 64, 8, 5), (128, 32, 8, 5), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 5),
         (64, 128, 4, 3), (128, 64, 4, 3)],
    ),
    (
        draw,
        ("CHUNK", "WARPS", "SEARCH_WARPS"),
        [(4096, 4, 8), (4096, 4, 4), (4096, 8, 8), (2048, 4, 4), (2048, 2, 8), (8192, 8, 8), (8192, 16, 16)],
    ),
    (rope, ("HEADS", "WARPS"), [(4, 1), (2, 1), (8, 1), (8, 2), (16, 4), (8, 4)]),
    (gate, ("TILE", "WARPS"), [(1024, 4), (512, 2), (512, 4), (2048, 4), (2048, 8), (1024, 2)]),
]  # fmt: skip


def probes(module: ModuleType, shape: Shape) -> list[Callable[[], Case]]:
    """What a module's constants are judged by."""
    return {
        decode: [
            lambda: decode_case(shape, [250 - row % 13 for row in range(256)], "250 tokens"),
            lambda: decode_case(shape, [4096 - row % 13 for row in range(128)], "4096 tokens"),
        ],
        prefill: [
            lambda: prefill_case(shape, [0] * 2, [4096] * 2, "2 x 4096 tokens"),
            lambda: prefill_case(shape, [0] * 64, [128] * 64, "64 x 128 tokens"),
        ],
        draw: [lambda: draw_case(shape, 256, 1.0)],
        rope: [lambda: rope_case(shape, 256), lambda: rope_case(shape, 8192)],
        gate: [lambda: gate_case(shape, 256), lambda: gate_case(shape, 8192)],
    }[module]


def sweep() -> Iterator[dict[str, Any]]:
    for module, names, variants in SWEEPS:
        usual = tuple(getattr(module, name) for name in names)
        for build in probes(module, SHAPES[0]):
            case = build()
            expected = flat(case.calls[0]())
            for variant in variants:
                yield {
                    "kernel": case.kernel, "shape": case.shape, "size": case.size,
                    "constants": dict(zip(names, variant, strict=True)), "default": variant == usual,
                } | tried(module, names, variant, case, expected)  # fmt: skip
            for name, value in zip(names, usual, strict=True):
                setattr(module, name, value)


def tried(
    module: ModuleType, names: tuple[str, ...], variant: tuple[int, ...], case: Case, expected: torch.Tensor
) -> dict[str, Any]:
    """A variant that the card has no room for is a result, not the end of the run."""
    from triton.runtime.errors import OutOfResources

    for name, value in zip(names, variant, strict=True):
        setattr(module, name, value)
    try:
        difference = error(flat(case.calls[0]()), expected)
        cold = microseconds(case.calls * max(1, 20 // len(case.calls)))
        hot = microseconds(case.calls[:1] * 40)
    except OutOfResources as problem:
        return {"problem": str(problem)[:80]}
    found: dict[str, Any] = {"cold_us": round(cold, 2), "hot_us": round(hot, 2), "differs_by": difference}
    if case.operations:
        found["tflop_per_s"] = round(case.operations / cold / 1e6, 1)
    return found


def flat(result: Any) -> torch.Tensor:
    return (result[1] if isinstance(result, tuple) else result).float().clone()


# ---------------------------------------------------------------- the run


CHECKED = (
    (SHAPES[0], torch.float32, checks),
    (SHAPES[0], torch.float16, checks),
    *((shape, torch.bfloat16, some) for shape in SHAPES for some in (checks, more_checks)),
)


def report_checks(seed: int) -> list[Check]:
    torch.manual_seed(seed)
    random.seed(seed)
    done = []
    for shape, kind, some in CHECKED:
        for check in some(shape, kind):
            done.append(check._replace(what=f"{check.what} {str(kind)[6:]}"))
            if not check.passed:
                print(
                    f"WRONG {check.kernel:14} {done[-1].what}: {check.error:.2e}, limit {check.limit:.0e}", flush=True
                )
    print(f"{sum(check.passed for check in done)} of {len(done)} checks passed (seed {seed})", flush=True)
    return done


def worst(done: list[Check]) -> dict[str, float]:
    """Per kernel, the largest error as a share of what is allowed; counts of wrong tokens have a limit of none."""
    shares: dict[str, float] = {}
    for check in done:
        share = check.error / check.limit if check.limit else check.error
        shares[check.kernel] = max(shares.get(check.kernel, 0.0), round(share, 3))
    return shares


def step_ms(rows: list[dict[str, Any]], shape: Shape) -> float:
    """What the kernels add to the matrix products of one decode step of 256 rows at 256 tokens of context."""
    hot = {row["kernel"]: row["hot_us"] for row in rows if row["shape"] == shape.name and row["size"] == "256 rows"}
    attention = next(
        row["cold_us"]
        for row in rows
        if row["shape"] == shape.name and row["kernel"] == "paged_decode" and row["size"].startswith("256 x 256 ")
    )
    drawing = next(
        row["cold_us"] for row in rows if row["shape"] == shape.name and row["size"].startswith("256 rows, ")
    )
    layer = 2 * hot["rms_norm"] + hot["rope_store"] + hot["silu_mul"] + attention
    return round((shape.layers * layer + hot["rms_norm"] + drawing) / 1000, 3)


def line(row: dict[str, Any], copied: float) -> str:
    speed = f"{row['tflop_per_s']:6.1f} TFLOP/s" if "tflop_per_s" in row else f"{row['gb_per_s'] / copied:6.0%} of copy"
    return f"{row['kernel']:14}{row['shape']:6}{row['size']:48}{row['cold_us']:10.2f}{row['hot_us']:10.2f}  {speed}"


def report_times() -> dict[str, Any]:
    copied = measured(copy_case())
    print(
        f"copy: {copied['gb_per_s']} GB/s\n{'kernel':14}{'shape':6}{'size':48}{'cold us':>10}{'hot us':>10}", flush=True
    )
    rows = []
    for build in cases():
        rows.append(measured(build()))
        print(line(rows[-1], copied["gb_per_s"]), flush=True)
    steps = {shape.name: step_ms(rows, shape) for shape in SHAPES}
    for name, milliseconds in steps.items():
        print(f"{name}: kernels of a decode step, 256 rows at 256 tokens: {milliseconds} ms beside the products")
    return {"copy_gb_per_s": copied["gb_per_s"], "times": rows, "kernels_of_a_step_ms": steps}


def report_sweep() -> list[dict[str, Any]]:
    rows = []
    for row in sweep():
        rows.append(row)
        told = row.get("problem") or f"cold {row['cold_us']:9.2f} hot {row['hot_us']:9.2f} {row.get('tflop_per_s', '')}"
        mark = "*" if row["default"] else " "
        wrong = "" if row.get("differs_by", 0.0) < 5e-3 else f"  WRONG by {row['differs_by']:.1e}"
        constants = " ".join(str(value) for value in row["constants"].values())
        print(f"{mark} {row['kernel']:14}{row['shape']:5}{row['size']:34}{constants:16}{told}{wrong}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="also time other constants")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random inputs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    asked = parser.parse_args()
    import triton

    done = report_checks(asked.seed)
    properties = torch.cuda.get_device_properties(0)
    results: dict[str, Any] = {"device": properties.name, "torch": torch.__version__, "triton": triton.__version__}
    results |= {"seed": asked.seed, "checks": len(done), "error_over_limit": worst(done)} | report_times()
    if asked.sweep:
        results["sweep"] = report_sweep()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(results, indent=1) + "\n")
    if not all(check.passed for check in done):
        sys.exit("some kernels are wrong: see the lines above")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 132

if __name__ == "__main__":
    if DEVICE == "cpu":
        sys.exit("this needs a GPU: torch finds none here")
    main()
