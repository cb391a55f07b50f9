"""Tailrace: RL post-training for language models without the synchronization barrier.

Every trajectory is generated, scored and consumed on its own; weights flow through a relay tier that nobody waits at.
One control plane decides, and runs the same on real processes and in virtual time. `docs/design.md` has the whole.
"""

__version__ = "0.1.0"
