"""What an evaluation comes to: the samples of every prompt counted up, and the figures of a set of prompts.

Control counts the samples of an evaluation while training with this, and `rollout/evaluate.py` those of a model that is
measured by itself, so both mean the same by avg@k and pass@k.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import msgspec

from tailrace.types import RIGHT_ABOVE, Natural, Struct

TRUNCATED = "length"  # why a sample ended that had no room for more


class EvalSet(Struct):
    """Prompts that are evaluated together, by name."""

    name: str
    prompts: Natural


class PromptScore(msgspec.Struct, gc=False):
    """The samples of one prompt so far."""

    scored: int = 0
    failed: int = 0  # without a verdict: they count as wrong
    right: int = 0
    reward: float = 0.0  # sum
    tokens: int = 0
    truncated: int = 0

    @property
    def samples(self) -> int:
        return self.scored + self.failed

    def add(self, reward: float | None, tokens: int = 0, finish: str = "") -> None:
        """A sample has ended; without a reward if its judge failed."""
        self.scored += reward is not None
        self.failed += reward is None
        self.right += reward is not None and reward > RIGHT_ABOVE
        self.reward += reward or 0.0
        self.tokens += tokens
        self.truncated += finish == TRUNCATED


class EvalResult(Struct):
    """The figures of one set under one version. Shares lie between 0 and 1."""

    name: str
    prompts: Natural
    samples: Natural  # of each prompt: the k of avg@k
    accuracy: float  # avg@k: share of all samples whose reward is above `RIGHT_ABOVE`
    passed: dict[int, float]  # pass@k for 1, 2, 4, ... and all samples: a prompt counts if any of k samples is right
    mean_reward: float  # of the samples with a verdict
    mean_tokens: float
    truncated: float  # share of the samples
    failed: Natural = 0  # samples without a verdict

    @property
    def metrics(self) -> dict[str, float]:
        """Under the names that trackers and the page show."""
        passed = {f"pass@{k}": share for k, share in self.passed.items()}
        figures = {f"avg@{self.samples}": self.accuracy, **passed, "reward": self.mean_reward}
        figures |= {"mean_length": self.mean_tokens, "truncated_share": self.truncated, "failed": float(self.failed)}
        return {f"eval/{self.name}/{name}": value for name, value in figures.items()}

    def __str__(self) -> str:
        k = self.samples
        several = f", pass@{k} {self.passed[k]:.3f}" if k > 1 else ""
        failed = f", {self.failed} without a verdict" if self.failed else ""
        return f"{self.name}: avg@{k} {self.accuracy:.3f}{several}, mean reward {self.mean_reward:.3f}{failed}"


def summed_up(name: str, scores: Sequence[PromptScore], samples: int) -> EvalResult:
    """Of prompts that have `samples` samples each; of fewer, while an evaluation is under way."""
    scored, failed = sum(one.scored for one in scores), sum(one.failed for one in scores)
    ended = max(1, scored + failed)
    return EvalResult(
        name,
        len(scores),
        samples,
        accuracy=sum(one.right for one in scores) / ended,
        passed={k: _passed(scores, k) for k in _attempts(samples)},
        mean_reward=sum(one.reward for one in scores) / max(1, scored),
        mean_tokens=sum(one.tokens for one in scores) / ended,
        truncated=sum(one.truncated for one in scores) / ended,
        failed=failed,
    )


def _attempts(samples: int) -> list[int]:
    return [*(1 << power for power in range(samples.bit_length()) if 1 << power < samples), samples]


def _passed(scores: Sequence[PromptScore], k: int) -> float:
    """pass@k, without bias: the chance that k of a prompt's samples, drawn without replacement, are not all wrong."""
    known = [one for one in scores if one.samples >= k]
    each = [1.0 - comb(one.samples - one.right, k) / comb(one.samples, k) for one in known]
    return sum(each) / max(1, len(each))
