"""Pulls a weight version from the relay's shared memory to a GPU while the replica goes on generating.

The worker begins a pull and polls between two engine steps. Generation only stops for the last part, a copy within the
GPU. Control orders one pull at a time and keeps the version until the pull is answered.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from tailrace.types import Version
from tailrace.weights.shared_memory import SharedMemoryReader

if TYPE_CHECKING:
    from tailrace.weights.staging import Staging


class PulledWeights(NamedTuple):
    """The argument of `Engine.load_weights`: weights on the device, or in host memory if the device is full."""

    version: Version
    weights: Any


class Puller:
    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._pulling: Future[PulledWeights] | None = None
        self.version: Version = -1  # of the current or last pull

    @property
    def busy(self) -> bool:
        return self._pulling is not None

    def begin(self, version: Version, reader: SharedMemoryReader) -> None:
        """Replaces a pull under way: that one was ordered by a controller that died, and nobody waits for it."""
        self.version = version
        self._pulling = self._thread.submit(self._pull, version, reader)

    def poll(self) -> PulledWeights | None:
        """The weights, once. Raises what went wrong."""
        if self._pulling is None or not self._pulling.done():
            return None
        pulled, self._pulling = self._pulling, None
        return pulled.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pull(self, version: Version, reader: SharedMemoryReader) -> PulledWeights:
        tensors = reader.open(version).tensors()
        return PulledWeights(version, self._staging.stage(tensors) or tensors)
