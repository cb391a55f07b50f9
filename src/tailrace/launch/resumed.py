"""What a run goes on with that is resumed by its settings file.

What it had stays, unless somebody says otherwise: an option, or a line of the file that was not there, or was another
one, when the run last started. So an option need not be given again, and a change of the file counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.load import read_files, with_given
from tailrace.config.options import read_words
from tailrace.config.tree import Config
from tailrace.store.errors import JournalError
from tailrace.store.journal import Journal, Meta
from tailrace.types import MALFORMED

KEY = "files"  # in `meta`: what the files said, by dotted key


def resumed(run: Path, files: Sequence[str], words: Sequence[str]) -> Config:
    journal = Journal(run)
    before = _said(journal)
    changed = {key: now for key, now in read_files(files).items() if key not in before or before[key] != now.value}
    return with_given(journal.config, changed | read_words(words))


def _said(journal: Journal) -> dict[str, Any]:
    try:
        return msgspec.json.decode(journal.meta.get(KEY, "{}"), type=dict[str, Any])
    except MALFORMED as error:
        raise JournalError(f"what the run noted of its settings files cannot be read ({error})") from None


def note_files(meta: Meta, files: Sequence[str]) -> None:
    """On disk with the next commit. Without files, as when it is resumed by its folder, those of before count on."""
    if files:
        said = {key: one.value for key, one in read_files(files).items()}
        meta.set(KEY, msgspec.json.encode(said).decode())
