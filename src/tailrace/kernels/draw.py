"""Token sampling on the device (inverse CDF): one pass over the logits, then a search in the chunk with the token.

Called by the native engine at the end of every decode step, inside its CUDA graph. The random number of a position is
that of `engines.sampling.uniform`, bit for bit, and the cumulative sums are float64, so that sampling on the CPU from
the same logits differs only where rounding moves an edge of the CDF past the number.
"""

# Triton hides launch options and loops from type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
WARPS = 4
SEARCH_WARPS = 8  # float64 sums are wide: more threads, fewer registers each
WRAP = 2**64


def draw(
    logits: torch.Tensor, temperature: float, seed: int, trajectories: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for every row of `logits`, and its log-prob at this temperature; temperature 0: greedy.

    `positions`: of the new tokens in their sequences. Logits with NaN or +inf, or with nothing but -inf, give a
    log-prob of NaN and some token of the vocabulary: the caller checks when it reads the results.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, logprobs
    chunks = -(-vocab // CHUNK)
    maxima = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    divisor = float(temperature) or 1.0
    _chunk_softmax[(chunks, rows)](
        logits, maxima, sums, divisor, logits.stride(0), vocab, chunks, CHUNK, num_warps=WARPS
    )  # fmt: skip
    _search[(rows,)](
        logits, maxima, sums, trajectories, positions, tokens, logprobs, divisor, _seeded(seed),
        logits.stride(0), vocab, chunks, triton.next_power_of_2(chunks), CHUNK, temperature == 0,
        num_warps=SEARCH_WARPS,
    )  # fmt: skip
    return tokens, logprobs


def _seeded(seed: int) -> int:
    """The splitmix64 state after the seed, as a signed integer, which is what a launch can pass."""
    state = (seed + 0x9E3779B97F4A7C15) % WRAP
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WRAP
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WRAP
    state ^= state >> 31
    return state - WRAP if state >= WRAP // 2 else state


@triton.jit
def _chunk_softmax(logits, maxima, sums, divisor, stride, vocab, chunks, chunk: tl.constexpr):
    """Softmax of one chunk: its maximum, and its sum of exponentials relative to that."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = part * chunk + tl.arange(0, chunk)
    score = _scores(logits + row * stride, at, vocab, divisor)
    maximum = tl.max(score, 0)
    total = tl.sum(tl.exp(score - tl.where(maximum == float("-inf"), 0.0, maximum)), 0)
    tl.store(maxima + row * chunks + part, maximum)
    tl.store(sums + row * chunks + part, total)


@triton.jit(do_not_specialize=["seeded"])
def _search(
    logits, maxima, sums, trajectories, positions, tokens, logprobs, divisor, seeded, stride, vocab, chunks,
    chunks_width: tl.constexpr, chunk: tl.constexpr, greedy: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, chunks_width)
    maximum = tl.load(maxima + row * chunks + part, mask=part < chunks, other=float("-inf"))
    mass = tl.load(sums + row * chunks + part, mask=part < chunks, other=0.0)
    top = tl.max(maximum, 0)
    mass = (mass * tl.exp(maximum - top)).to(tl.float64)
    total = tl.sum(mass, 0)
    number = _uniform(seeded, tl.load(trajectories + row), tl.load(positions + row))
    target = number * total
    if greedy:
        chosen = _first(part, maximum == top, maximum == top)
    else:
        chosen = _first(part, tl.cumsum(mass, 0) > target, mass > 0)

    at = chosen * chunk + tl.arange(0, chunk)
    score = _scores(logits + row * stride, at, vocab, divisor)
    if greedy:
        token = _first(at, score == top, score == top)
    else:
        weight = tl.exp(score - top).to(tl.float64)
        before = tl.sum(tl.where(part < chosen, mass, 0.0), 0)
        # this sum and the chunk's first one round differently: search the same share of it, so that no token is lost
        share = (target - before) / tl.sum(tl.where(part == chosen, mass, 0.0), 0)
        token = _first(at, tl.cumsum(weight, 0) > share * tl.sum(weight, 0), weight > 0)
    token = tl.minimum(token, vocab - 1)
    tl.store(tokens + row, token.to(tl.int64))
    reached = tl.sum(tl.where(at == token, score, 0.0), 0) - top
    tl.store(logprobs + row, (reached.to(tl.float64) - tl.log(total)).to(tl.float32))


@triton.jit
def _scores(row, at, vocab, divisor):
    return tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / divisor


@triton.jit
def _first(at, reached, possible):
    """The first possible index that is reached; if rounding lets none be reached, the last possible one."""
    first = tl.min(tl.where(reached & possible, at, 2147483647), 0)
    last = tl.max(tl.where(possible, at, 0), 0)
    return tl.where(first == 2147483647, last, first)


@triton.jit
def _uniform(seeded, trajectory, position):
    state = _mix(seeded.to(tl.int64).to(tl.uint64, bitcast=True) + trajectory.to(tl.uint64, bitcast=True))
    state = _mix(state + position.to(tl.uint64, bitcast=True))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mix(state):
    """The splitmix64 finaliser."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)
