"""A first-in, first-out queue that is a struct, so that it is part of a snapshot like everything else in control."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Fifo(msgspec.Struct, Generic[T]):
    """A list with a moving head: O(1) amortised at both ends."""

    items: list[T] = msgspec.field(default_factory=list[T])
    head: int = 0

    def __len__(self) -> int:
        return len(self.items) - self.head

    def push(self, item: T) -> None:
        self.items.append(item)

    def first(self) -> T:
        return self.items[self.head]

    def pop(self) -> T:
        item = self.items[self.head]
        self.head += 1
        if self.head > 64 and self.head * 2 > len(self.items):
            del self.items[: self.head]
            self.head = 0
        return item

    def contents(self) -> list[T]:
        return self.items[self.head :]
