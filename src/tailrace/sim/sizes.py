"""How large the samples of a step are, and what follows from that for KV, prefill and training.

Drawn from the law of lengths, with the run's seed: these are the samples that a simulation meets. For the closed forms:
the upper bound (`bound.py`) and LlamaRL's balance (`planner/balance.py`).
"""

from __future__ import annotations

from math import ceil

import msgspec
import numpy as np

from tailrace.config.tree import Workload
from tailrace.lengths import LengthLaw

GROUPS_DRAWN = 512  # enough for means and squares; a larger step has the same law


class Sizes(msgspec.Struct, frozen=True):
    """The completions of a step, and what follows from them for KV and training."""

    completions: np.ndarray
    longest: np.ndarray  # of each group
    sequences: list[int]  # with their prompts and tool output: what is trained on
    kv: float  # tokens that one running sample holds, averaged over its life, its share of the prompt included
    prefill: int  # tokens of prompt per sample: a group reads its prompt once


def sizes_of(workload: Workload, seed: int, most: int = GROUPS_DRAWN, beyond_a_step: bool = False) -> Sizes:
    """Of a step's groups, at most `most`; or of so many, however many a step has."""
    law = LengthLaw(workload, seed)
    count = most if beyond_a_step else min(most, workload.prompts_per_step)
    groups = [law.group(id, workload.group_size) for id in range(count)]
    completions = np.array(groups, dtype=np.float64)
    tools = int((workload.turns.mean - 1) * workload.turns.tool_tokens)
    longest = completions.max(axis=1)
    prompt_time = workload.prompt_tokens * longest.sum()  # held until the last of the group is done
    kv = ((completions * (completions / 2 + tools / 2)).sum() + prompt_time) / completions.sum()
    sequences = [workload.prompt_tokens + tools + length for group in groups for length in group]
    prefill = ceil(workload.prompt_tokens / workload.group_size) + tools
    return Sizes(completions.ravel(), longest, sequences, float(kv), prefill)
