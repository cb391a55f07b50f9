"""GPU memory: the shares of trainer and replicas, and recovery from out-of-memory errors.

The trainer and the engine both free memory and retry in smaller pieces; what cannot be made smaller ends the run with a
sentence.
"""

from __future__ import annotations

import gc

import torch

from tailrace.config.tree import Config
from tailrace.errors import TailraceError

TO_ITSELF = 0.85  # of a GPU's memory, for replicas that have it to themselves
BESIDE_TRAINER = 0.3  # for replicas that share it with a trainer: master weights, moments, gradients, activations
OTHER_ERRORS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of libraries that allocate without torch


class DoesNotFitError(TailraceError):
    """The work does not fit into the device's memory."""


def share_of_replicas(config: Config, cards: int) -> float:
    return config.rollout.memory or (BESIDE_TRAINER if is_shared(config, cards) else TO_ITSELF)


def share_of_trainer(config: Config, cards: int) -> float:
    """What replicas do not use: they may start, or restart, at any time."""
    return 1.0 - share_of_replicas(config, cards) if is_shared(config, cards) else 1.0


def is_shared(config: Config, cards: int) -> bool:
    """Whether the trainer and the replicas use the same GPU."""
    computing = "emulated" not in (config.trainer.engine, config.rollout.engine)
    return computing and cards == 1 and "cpu" not in (config.trainer.device, config.rollout.device)


def free_memory() -> None:
    """Of an abandoned forward or backward pass."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # kernels may still use some of it
        torch.cuda.empty_cache()


def ran_out(error: BaseException) -> bool:
    """Whether it is an out-of-memory error, also one of a compiler or a library."""
    cause = getattr(error, "inner_exception", None) or error
    if isinstance(cause, torch.OutOfMemoryError):
        return True
    return isinstance(cause, RuntimeError) and any(words in str(cause) for words in OTHER_ERRORS)
