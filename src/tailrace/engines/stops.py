"""Stop strings: whether the newest token of a sequence has completed one. The same for every engine that samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

LONGEST_CHARACTER = 4  # bytes, and so at most that many tokens


class StopStrings:
    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = stops, decode
        self._reach = max([len(stop.encode()) for stop in stops], default=0) + LONGEST_CHARACTER

    def __bool__(self) -> bool:
        return bool(self._stops)

    def completed(self, tokens: array[int], prompt: int) -> bool:
        """Whether the last token did it. What stood there before it, perhaps from a tool or from another engine, does
        not count."""
        if not self._stops:
            return False
        tail = tokens[max(prompt, len(tokens) - self._reach) :]
        before, after = self._decode(tail[:-1].tolist()), self._decode(tail.tolist())
        return any(after.count(stop) > before.count(stop) for stop in self._stops)
