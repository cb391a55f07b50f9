"""What filters have saved: prompts, samples and tokens that were not generated because they would teach nothing."""

from __future__ import annotations

import msgspec


class Savings(msgspec.Struct, frozen=True):
    """What was not generated, because it would have taught nothing."""

    skipped_prompts: int = 0  # by their history
    stopped_groups: int = 0  # before all of their samples were started
    unstarted_samples: int = 0  # of these
    left_out_samples: int = 0  # generated, but not trained on: wrong ones of groups with few right ones
    tokens: int = 0  # of the samples that were not started, if they had been as long as the others on average

    def __bool__(self) -> bool:
        return bool(self.skipped_prompts or self.stopped_groups or self.left_out_samples)

    def __str__(self) -> str:
        cut = f"{self.skipped_prompts:,} prompts skipped, {self.stopped_groups:,} groups stopped early"
        spared = f"{self.unstarted_samples:,} samples not generated (about {self.tokens:,} tokens)"
        return f"{cut}: {spared}; {self.left_out_samples:,} wrong ones not trained on"


class SavingsCount:
    """Adds them up, for the fold of a journal (`fold.py`)."""

    def __init__(self) -> None:
        self.skipped_prompts = 0
        self.unstarted = 0  # samples of groups that were stopped
        self.left_out = 0

    def so_far(self, stopped_groups: int, mean_tokens: float) -> Savings:
        """`mean_tokens`: of the samples that were generated."""
        tokens = round(self.unstarted * mean_tokens)
        return Savings(self.skipped_prompts, stopped_groups, self.unstarted, self.left_out, tokens)
