"""Who may take how much of a GPU's memory; and when it runs out: how to tell, and what can be freed before the work is
tried again in smaller pieces.

The trainer and the engine both go on with less at once; what cannot be made any smaller ends the run with a sentence.
"""

from __future__ import annotations

import gc

import torch

from tailrace.config.tree import Config
from tailrace.errors import TailraceError

TO_ITSELF = 0.85  # of a card's memory, for replicas that have it to themselves
BESIDE_TRAINER = 0.3  # for replicas beside a trainer, which needs more: masters, moments, gradients, activations
UNNAMED = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # from libraries that take memory without torch


class DoesNotFitError(TailraceError):
    """What is to be computed does not fit into the device's memory."""


def share_of_replicas(config: Config, cards: int) -> float:
    return config.rollout.memory or (BESIDE_TRAINER if is_shared(config, cards) else TO_ITSELF)


def share_of_trainer(config: Config, cards: int) -> float:
    """All that it does not share with replicas: those may come, or come back, at any time."""
    return 1.0 - share_of_replicas(config, cards) if is_shared(config, cards) else 1.0


def is_shared(config: Config, cards: int) -> bool:
    """Whether the trainer and the replicas compute on one card."""
    computing = config.trainer.engine == config.rollout.engine == "native"
    return computing and cards == 1 and "cpu" not in (config.trainer.device, config.rollout.device)


def free_memory() -> None:
    """What an abandoned pass has left."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # some of it may still be at work
        torch.cuda.empty_cache()


def ran_out(error: BaseException) -> bool:
    """Also where a compiler or a library met it."""
    cause = getattr(error, "inner_exception", None) or error
    if isinstance(cause, torch.OutOfMemoryError):
        return True
    return isinstance(cause, RuntimeError) and any(words in str(cause) for words in UNNAMED)
