"""How late the controller's event loop is: the lag of a callback that is due several times a second.

A loop that is blocked takes no samples, so those that it missed are counted when it is back: a block of 3 s is not one
late sample, but all that were due in it, each less late than the one before. So the percentile is one of time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

SAMPLE_S = 0.1
KEPT = 600  # samples: one minute


class LoopLag:
    """Measures the loop that it is made in, until `close`. `on_sample` is called with every sample."""

    def __init__(self, on_sample: Callable[[], None] = lambda: None) -> None:
        self.samples = 0  # so far
        self._on_sample = on_sample
        self._loop = asyncio.get_running_loop()
        self._lags: deque[float] = deque(maxlen=KEPT)
        self._due = self._loop.time()
        self._wait()

    def close(self) -> None:
        self._handle.cancel()

    @property
    def p99_s(self) -> float:
        """Over the last minute; 0 before there are any samples."""
        return sorted(self._lags)[int(0.99 * len(self._lags))] if self._lags else 0.0

    def _wait(self) -> None:
        self._due += SAMPLE_S
        self._handle = self._loop.call_at(self._due, self._sample)

    def _sample(self) -> None:
        now = self._loop.time()
        while self._due <= now:
            self._lags.append(now - self._due)
            self._due += SAMPLE_S
        self._due -= SAMPLE_S
        self.samples += 1
        self._on_sample()
        self._wait()
