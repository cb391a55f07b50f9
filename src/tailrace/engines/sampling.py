"""Drawing tokens: a random number per token that depends on nothing but the seed, the trajectory and the position; and
on how often the sample has failed (`Job.stream`).

Called by the native engine for its whole batch and by any reference program with one row: both get the same token from
the same logits, whatever else is in the batch. Log-probs are those of the distribution really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from tailrace.config.tree import Sampling

CELL = 64  # tokens that the first, coarse search through the vocabulary takes together
NUCLEUS = 1024  # top-p looks at so many tokens before it sorts the whole vocabulary


def uniform(seed: int, trajectories: ArrayLike, positions: ArrayLike) -> np.ndarray:
    """Numbers in [0, 1), one per (trajectory, position): integer arithmetic only, so the same on every machine."""
    state = _mix(np.array([seed % 2**64], np.uint64))
    state = _mix(state + np.asarray(trajectories, np.int64).astype(np.uint64))
    state = _mix(state + np.asarray(positions, np.int64).astype(np.uint64))
    return (state >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(
    logits: torch.Tensor, seed: int, trajectories: Sequence[int], positions: Sequence[int], sampling: Sampling
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """One token for every row of `logits`, with its log-prob. `positions`: the positions that the new tokens will
    have."""
    scores = allowed_scores(logits.float(), sampling)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp_()
    cells = _cells(weights)
    sums = cells.sum(-1).double().cumsum(-1)
    _refuse_nonsense(sums[:, -1])
    if sampling.temperature == 0:
        tokens = scores.argmax(-1)
    else:
        tokens = _invert(cells, sums, torch.from_numpy(uniform(seed, trajectories, positions)).to(sums.device))
    chosen = (scores.gather(-1, tokens[:, None]) - peak)[:, 0]
    return tokens.int().cpu().numpy(), (chosen.double() - sums[:, -1].log()).float().cpu().numpy()


def _refuse_nonsense(totals: torch.Tensor) -> None:
    if not bool(torch.isfinite(totals).all()):
        raise FloatingPointError("the model's logits are not finite: its weights have diverged")


def _cells(weights: torch.Tensor) -> torch.Tensor:
    rest = -weights.shape[-1] % CELL
    padded = torch.nn.functional.pad(weights, (0, rest)) if rest else weights
    return padded.view(len(weights), -1, CELL)


def _invert(cells: torch.Tensor, sums: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution in two searches, first for the cell, then within it."""
    target = (draws * sums[:, -1])[:, None]
    cell = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[-1] - 1)
    before = torch.where(cell > 0, sums.gather(-1, (cell - 1).clamp(min=0)), 0.0)
    rows = torch.arange(len(cells), device=cells.device)
    inside = cells[rows, cell[:, 0]].double().cumsum(-1) + before
    # the two sums round differently: stay below the cell's end, so that a token of weight zero is never hit
    target = torch.minimum(target, torch.nextafter(inside[:, -1:], torch.zeros_like(target)))
    return (cell * CELL + torch.searchsorted(inside, target, right=True))[:, 0]


def allowed_scores(logits: torch.Tensor, sampling: Sampling, may_look: bool = True) -> torch.Tensor:
    """Scores at the temperature, -inf for what top-k and top-p exclude. Without `may_look` nothing is read back from
    the device, as a CUDA graph demands."""
    if sampling.temperature == 0:
        return logits
    scores = logits if sampling.temperature == 1 else logits / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = _keep_from(scores, scores.topk(sampling.top_k).values[:, -1:])
    if sampling.top_p < 1:
        scores = _keep_from(scores, _nucleus_edge(scores, sampling.top_p, may_look))
    return scores


def _keep_from(scores: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """Ties with the lowest are kept: which of them sorts first must not matter."""
    return scores.masked_fill(scores < lowest, -torch.inf)


def _nucleus_edge(scores: torch.Tensor, top_p: float, may_look: bool) -> torch.Tensor:
    """The lowest score among the fewest tokens that hold `top_p` of the probability."""
    whole = scores.double().logsumexp(-1, keepdim=True)
    ranked, mass = _likeliest(scores, whole, NUCLEUS if may_look else scores.shape[-1])
    if may_look and not bool((mass[:, -1] >= top_p).all()):
        ranked, mass = _likeliest(scores, whole, scores.shape[-1])
    inside = (mass < top_p).sum(-1, keepdim=True).clamp(max=ranked.shape[-1] - 1)
    return ranked.gather(-1, inside)


def _likeliest(scores: torch.Tensor, whole: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest scores in order, and the probability of each with all before it."""
    ranked = scores.topk(min(width, scores.shape[-1])).values
    return ranked, (ranked - whole).exp().cumsum(-1)
