"""GPU memory: recovery from out-of-memory errors.

The trainer and the engine both free memory and retry in smaller pieces; what cannot be made smaller ends the run with a
sentence.
"""

from __future__ import annotations

import gc

import torch

from tailrace.errors import TailraceError

OTHER_ERRORS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of libraries that allocate without torch


class DoesNotFitError(TailraceError):
    """The work does not fit into the device's memory."""


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
