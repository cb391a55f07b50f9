"""Journals that were recorded before names and the path of tokens changed are still decided as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from old_journals import OldJournal
from tailrace.control.plane import ControlPlane

RECORDED = sorted((Path(__file__).parent / "journals").glob("*.jsonl.xz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_every_command_is_the_same_but_for_names(path: Path) -> None:
    journal = OldJournal(path)
    plane = ControlPlane(journal.config)
    for entry in journal.entries():
        assert plane.handle(entry.now, entry.event) == entry.commands, entry.event
    assert plane.state.stopped == "all steps are done"
