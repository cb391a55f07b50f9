"""Tailrace: RL post-training for language models without the synchronization barrier.

Every trajectory is generated, scored and consumed on its own; weights flow through a relay tier that nobody waits at.
One control plane decides, and runs the same on real processes and in virtual time. `docs/design.md` has the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.release import __version__

if TYPE_CHECKING:
    from tailrace.api import Run, fork, simulate, train

PUBLIC = ("Run", "fork", "simulate", "train")
__all__ = ["Run", "__version__", "fork", "simulate", "train"]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: `import tailrace` alone costs next to nothing."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    from tailrace import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
