"""The base of every error whose text is a sentence for people: what is wrong, where, and what to write instead.

Commands print such a sentence and exit with status 2; a component sends it to the controller. Any other exception is a
bug and keeps its traceback.
"""

from __future__ import annotations


class TailraceError(ValueError):
    """Subclasses say what could not be done."""


class UsageError(TailraceError):
    """The command line makes no sense."""
