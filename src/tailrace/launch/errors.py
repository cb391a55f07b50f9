"""The error of a command line that makes no sense."""

from __future__ import annotations

from tailrace.errors import TailraceError


class UsageError(TailraceError):
    """What is wrong with the command line, and what to write instead."""
