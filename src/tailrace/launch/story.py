"""`tailrace story`: what happened to one trajectory, group, replica, relay, version or prompt of a recorded run."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import UsageError
from tailrace.logs import output
from tailrace.obs.ending import LastStop, ending_of
from tailrace.obs.story import StoryLine, render_known, render_story, story
from tailrace.store.journal import Journal
from tailrace.store.trajectories import known_trajectories
from tailrace.types import parse_label


def print_story(run: Path, label: str) -> int:
    try:
        kind, number = parse_label(label)
    except ValueError as error:
        raise UsageError(str(error)) from None
    journal, last = Journal(run), LastStop()
    output(render_story(story(last.passing(journal.entries()), label, journal.config)))
    output(render_story([StoryLine(last.now, str(ending_of(journal.meta, journal.path.parent, last.stop)))]))
    if known := known_trajectories(run, kind, number):
        output(render_known(known))
    if kind == "trajectory" and known and journal.meta.get("driver") != "simulation":
        from tailrace.launch.samples import print_sample  # numpy and a tokenizer are for those who need them

        output("")
        print_sample(run, number)
    return 0
