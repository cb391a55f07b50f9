"""When a device's memory runs out: how to tell, and what can be freed before the work is tried again in smaller pieces.

The trainer and the engine both go on with less at once; what cannot be made any smaller ends the run with a sentence.
"""

from __future__ import annotations

import gc

import torch

UNNAMED = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # from libraries that take memory without torch


class DoesNotFitError(ValueError):
    """What is to be computed does not fit into the device's memory."""


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
