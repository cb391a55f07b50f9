"""How many tokens go through the model at once, and what happens when memory runs out.

`step.py` asks for `tokens` when it packs, and calls `shrink` when a pass found no memory. Gradients do not depend on
the budget, so the mini-batch is repeated with half of it and nothing is lost; half of it stays the budget from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tailrace.model.memory import DoesNotFitError, ran_out

log = logging.getLogger(__name__)


def take_share(share: float, device: str) -> None:
    """Of a card that others compute on too: without this, whoever is first would leave them with nothing."""
    if share and device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(share, device)


@contextmanager
def at_start() -> Iterator[None]:
    """For what stays on the device for good, and cannot be made in smaller pieces."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise DoesNotFitError(
            "there is no memory for what training keeps beside the weights; end what else runs on the GPU, lower "
            "rollout.memory if a replica does, use a GPU with more memory, or several (trainer.ranks)"
        ) from None


class TokenBudget:
    def __init__(self, tokens: int, recompute: bool):
        self.tokens = tokens
        self._recompute = recompute

    def shrink(self, longest: int) -> None:
        """Half, but `longest`, of all sequences, must still go through in one piece."""
        if self.tokens <= longest:
            raise DoesNotFitError(f"one sequence of {longest} tokens does not fit into memory: {self._advice()}")
        before, self.tokens = self.tokens, max(longest, self.tokens // 2)
        log.warning(
            f"no memory for {before} tokens in one pass: from now on {self.tokens} (trainer.tokens_per_batch); the "
            "mini_batch is repeated from its start, nothing is lost"
        )

    def refuse(self) -> None:
        """Where the others cannot be told in the middle of a pass."""
        raise DoesNotFitError(
            f"one of several trainer ranks has no memory for {self.tokens} tokens in one pass: lower "
            f"trainer.tokens_per_batch, or {self._advice()}"
        )

    def _advice(self) -> str:
        more = "" if self._recompute else "set trainer.recompute = true, "
        return f"{more}lower workload.max_completion_tokens or trainer.logit_tokens, or use a GPU with more memory"
