"""`python -m tailrace.browse.indexing RUN`: keeps the text index of a run up to date, at the lowest priority, until its
standard input ends. The page starts it. While another process writes the index, it waits."""

from __future__ import annotations

import os
import select
import sys
from contextlib import closing
from pathlib import Path

from tailrace.browse.index import SearchIndex
from tailrace.browse.index_file import BrowseError
from tailrace.store.errors import JournalError

PAUSE_S = 2.0


def main(run: Path) -> None:
    os.nice(19)
    while not _ended(0.0):
        try:
            with closing(SearchIndex(run)) as index:
                _follow(index)
        except (BrowseError, JournalError, OSError):  # locked, or the run cannot be read at this moment
            if _ended(PAUSE_S):
                return


def _follow(index: SearchIndex) -> None:
    more = True
    while not _ended(0.0 if more else PAUSE_S):
        more = index.update()


def _ended(timeout_s: float) -> bool:
    """Whoever started it has gone."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
