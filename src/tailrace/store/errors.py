"""What is said when a run cannot be read or written."""

from __future__ import annotations


class JournalError(ValueError):
    """Why a run cannot be read or written, for the person who named it."""
