"""A version on its way from the relay's memory to a GPU, beside the steps that the replica goes on with.

The worker begins a pull and asks between two steps whether it has landed; only then does generation stand still, for as
long as a copy within the GPU takes. Control orders one pull at a time and keeps the version until it is answered.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from tailrace.relay.arena import ArenaReader
from tailrace.types import Version

if TYPE_CHECKING:
    from tailrace.engines.weights import Staging


class Landed(NamedTuple):
    """What `Engine.load_weights` is to be given: weights on the device, or in host memory if the device is full."""

    version: Version
    weights: Any


class Puller:
    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._pulling: Future[Landed] | None = None
        self.version: Version = -1  # on its way, or the last one that was

    @property
    def busy(self) -> bool:
        return self._pulling is not None

    def begin(self, version: Version, reader: ArenaReader) -> None:
        """What is still on its way was ordered by a controller that died: nobody waits for it any more."""
        self.version = version
        self._pulling = self._thread.submit(self._bring, version, reader)

    def landed(self) -> Landed | None:
        """The weights, once. Raises what went wrong on the way."""
        if self._pulling is None or not self._pulling.done():
            return None
        pulled, self._pulling = self._pulling, None
        return pulled.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _bring(self, version: Version, reader: ArenaReader) -> Landed:
        tensors = reader.open(version).tensors()
        return Landed(version, self._staging.bring(tensors) or tensors)
