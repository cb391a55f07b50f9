"""What is said when a run cannot be read or written."""

from __future__ import annotations

from tailrace.errors import TailraceError


class JournalError(TailraceError):
    """Why a run cannot be read or written, for the person who named it."""
