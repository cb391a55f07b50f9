"""What those who look after components need of the controller."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tailrace.control.state import State
from tailrace.protocol import Event


class RunControl(Protocol):
    @property
    def now(self) -> float: ...

    @property
    def state(self) -> State: ...

    @property
    def stopped(self) -> str: ...

    @property
    def run_id(self) -> str: ...

    def tell(self, event: Event) -> None:
        """Something that control has to hear."""
        ...

    def fail(self, reason: str) -> None:
        """The run cannot go on."""
        ...

    def then(self, doing: Coroutine[Any, Any, None]) -> None:
        """To be done once the books are closed."""
        ...

    def later(self, wait_s: float, action: Callable[[], None]) -> None:
        """To be done when everything that was said until then has been taken in."""
        ...

    def note(self, sentence: str) -> None:
        """For the controller's log."""
        ...

    def report(self, sentence: str) -> None:
        """For the terminal, and the log."""
        ...
