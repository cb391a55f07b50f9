"""Answers that all who look at the same thing share: each is worked out once, however many ask for it.

An answer is given again while it is fresh. When it is not, it is worked out anew, unless the files that it follows from
are as they were. Who asks while somebody else works it out waits for that one. What is kept is bounded in bytes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from tailrace.page.follow import PageContent

FRESH_S = 0.9  # a page asks once a second
KEPT = 32 << 20  # bytes

Stamp = Hashable  # of the files that an answer follows from; None: it follows from more than that


class SharedAnswer:
    def __init__(self) -> None:
        self.working = threading.Lock()
        self.content: PageContent | None = None
        self.stamp: Stamp = None
        self.at = 0.0


class SharedAnswers:
    """By what was asked for. Methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # of the table, never held while an answer is worked out
        self._answers: OrderedDict[str, SharedAnswer] = OrderedDict()

    def fresh(self, asked: str) -> PageContent | None:
        """An answer that need not be worked out."""
        with self._lock:
            found = self._answers.get(asked)
            return found.content if found is not None and self._is_fresh(found) else None

    def get(self, asked: str, stamp: Callable[[], Stamp], work: Callable[[], PageContent]) -> PageContent:
        with self._lock:
            found = self._answers.setdefault(asked, SharedAnswer())
            self._answers.move_to_end(asked)
        with found.working:
            if found.content is None or not self._is_fresh(found):
                self._renew(found, stamp(), work)
                self._drop_oldest()
            assert found.content is not None, "it was worked out, or an error was raised"
            return found.content

    def _is_fresh(self, one: SharedAnswer) -> bool:
        return one.content is not None and self._clock() - one.at < FRESH_S

    def _renew(self, one: SharedAnswer, stamp: Stamp, work: Callable[[], PageContent]) -> None:
        at = self._clock()
        if one.content is None or stamp is None or stamp != one.stamp:
            one.content = work()
        one.stamp, one.at = stamp, at

    def _drop_oldest(self) -> None:
        with self._lock:
            size = sum([len(one.content.content) for one in self._answers.values() if one.content is not None])
            while size > KEPT and len(self._answers) > 1:
                _, oldest = self._answers.popitem(last=False)
                size -= len(oldest.content.content) if oldest.content is not None else 0
