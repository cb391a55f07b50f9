"""The story of each kind of part, from a journal small enough to read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import drive
from tailrace.config import load
from tailrace.config.tree import Local, Strangers
from tailrace.obs.event_text import _why_forgotten
from tailrace.obs.story import StoryError, render_story, story
from tailrace.protocol import (
    Assignment,
    Cancel,
    CheckFailed,
    Checkpointed,
    Command,
    Drop,
    Event,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    HandedIn,
    HostJoined,
    JudgedTurn,
    LoadWeights,
    Parked,
    Progressed,
    PromptsAdded,
    Publish,
    PullFailed,
    RelayJoined,
    Release,
    ReplicaJoined,
    ReplicaLost,
    Request,
    Route,
    SampleFailed,
    ScoringStarted,
    Start,
    TimerFired,
    Train,
    Trained,
    TrainGroup,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.store.journal import Entry
from tailrace.types import Prompt


def request(trajectory: int, attempt: int = 1, group: int = 0, resume: bool = False) -> Request:
    return Request(trajectory, attempt, group, group, 64, resume)


def meta(trajectory: int, attempt: int = 1, tokens: int = 0, finish: str = "") -> TrajectoryMeta:
    return TrajectoryMeta(trajectory, attempt, tokens, 0, 0, finish)


EVENTS: list[tuple[float, Event, Sequence[Command]]] = [
    (0.0, ReplicaJoined(0, 1, 0, -1, 90_000, 100), [Start("relay", 0, 1)]),
    (0.1, RelayJoined(0, 1), [Route(0, 1, 1, ()), Publish(1, 0, 0)]),
    (0.2, VersionStored(0, 1, 0), [LoadWeights(0, 1, 0, 0)]),
    (0.3, PromptsAdded(0, (Prompt(0, 64), Prompt(1, 64))), []),
    (0.3, PromptsAdded(0, (Prompt(0, 64), Prompt(1, 64))), []),  # a second answer
    (0.4, WeightsLoaded(0, 1, 0), [Generate(0, 1, (request(0), request(1), request(2, group=1)))]),
    (0.5, ReplicaJoined(1, 1, 0, 0, 90_000, 100), []),
    (1.0, Progressed(0, 1, 500, 3, 0), []),
    (2.0, Progressed(0, 1, 900, 2, 1), []),
    (3.0, Finished(0, meta(0, tokens=4021, finish="stop")), []),
    (3.1, Finished(0, meta(0, tokens=4021, finish="stop")), []),  # a second report
    (3.2, ScoringStarted(0, 1, (JudgedTurn(1, 1, 0), JudgedTurn(2, 1, 0, final=True), JudgedTurn(0, 1, 0))), []),
    (3.9, GenerationResumed(0, 1, (JudgedTurn(1, 1, 1),)), []),
    (3.9, ScoringStarted(0, 1, (JudgedTurn(1, 1, 0),)), []),  # late
    (4.0, TimerFired("repack"), [Release(0, 1)]),
    (
        4.1,
        Parked(0, 1, (meta(1, tokens=3112), meta(2, tokens=5))),
        [Generate(1, 1, (request(1, 2, resume=True), request(2, 2, group=1, resume=True)))],
    ),
    (5.0, SampleFailed(1, 1, 2, "the tool hung"), [Generate(1, 1, (request(1, 3),))]),
    (6.0, ReplicaLost(1, 1, "its process ended"), [Generate(0, 1, (request(1, 4, resume=True),))]),
    (7.0, Finished(0, meta(1, 4, 4100, "length")), [Train(1, 0, 0, True, (TrainGroup(0, (0, 1)),))]),
    (
        8.0,
        Trained(1, 0, 0),
        [Publish(1, 1, 0), Cancel(0, 1, (Assignment(2, 2),)), Forget((2,), "stale"), Drop(0, 1, 0)],
    ),
    (9.0, Checkpointed(1, 1), [Forget((0, 1))]),
    (9.5, PullFailed(0, 1, 1, "no memory"), []),
]
ENTRIES = [Entry(seq, *each) for seq, each in enumerate(EVENTS, start=1)]


CONFIG = load([], ["--model.preset", "qwen2.5-7b", "--workload.group_size", "2"])


def told(name: str) -> list[str]:
    return [line.text for line in story(ENTRIES, name, CONFIG)]


def test_a_trajectory_that_ran_straight_through() -> None:
    assert told("t0") == [
        "t0 given to r0 (attempt 1, version 0), a sample of g0 (p0)",
        "finished: 4,021 tokens, version 0, stop",
        "a late or second report that attempt 1 finished on r0 was ignored",
        "picked for step 0, mini-batch 0 (staleness 0)",
        "trained in step 0, mini-batch 0 (staleness 0)",
        "freed: a checkpoint covers it",
    ]


def test_a_trajectory_that_had_an_eventful_life() -> None:
    assert told("t1")[1:9] == [
        "with a judge on r0; more turns may follow",
        "answered; continues with turn 2",
        "parked by r0: 3,112 tokens, version 0",
        "moved from r0 to r1 by repack (attempt 2, version 0): 3,112 tokens kept",
        "failed in attempt 2: the tool hung",
        "tried again on r1 (attempt 3, version 0)",
        "r1 lost: its process ended",
        "moved from r1, which lost it, to r0 (attempt 4, version 0); resumes from its prefix in the sample store",
    ]


def test_what_is_generated_anew_is_not_said_to_be_covered_by_a_checkpoint() -> None:
    assert _why_forgotten([], Forget((0,), "regenerate")).endswith("generated anew")
    assert _why_forgotten([], Forget((0,), "lost")).endswith("its prompt is opened again")


def test_what_judges_have() -> None:
    assert "with a judge on r0" in told("t2")
    assert "2 trajectories (t1 to t2) with a judge" in told("r0")
    assert "1 trajectory (t1) answered; generating again" in told("r0")
    assert not any("with a judge" in line for line in told("t0")), "it was finished before"


def test_a_group() -> None:
    assert told("g0")[:2] == ["g0 opened for p0 (64 tokens)", "t0 to t1 given to r0"]
    assert told("g0")[-2:] == ["trained in step 0, mini-batch 0 (staleness 0)", "freed: a checkpoint covers it"]
    assert told("g1")[-2:] == [
        "t2 cancelled on r0",
        "dropped: its oldest token is of version 0, too stale to train on",
    ]


def test_a_prompt() -> None:
    assert told("p0")[:2] == ["p0 pooled: 64 tokens", "opened as g0"]


def test_the_load_of_a_replica_is_one_line() -> None:
    lines = told("r0")
    assert lines[0] == "r0 joined on host 0 without weights, room for 90,000 tokens of KV"
    assert lines[-1] == "peak load: 900 tokens of KV, 3 running, 1 waiting"


def test_a_relay_and_a_version() -> None:
    assert told("h0")[:4] == [
        "h0 to be started, start 1 in a row",
        "h0 joined, holding nothing",
        "told to forward to no relay (route 1)",
        "gets v0 from the trainer, as master relay",
    ]
    assert told("v1") == [
        "v1 made by step 0",
        "on the way from the trainer to h0",
        "checkpointed",
        "r0 could not load it: no memory",
    ]
    assert "dropped from h0" in told("v0")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t99", "t99 is not in this run; its trajectories are t0 to t2"),
        ("r7", "r7 is not in this run; its replicas are r0 to r1"),
        ("h3", "its relays are h0"),
    ],
)
def test_an_unknown_id_says_what_there_is(name: str, words: str) -> None:
    with pytest.raises(StoryError) as caught:
        told(name)
    assert words in str(caught.value)


def test_a_run_without_any() -> None:
    with pytest.raises(StoryError, match="which has no trajectories"):
        story(ENTRIES[:2], "t0", CONFIG)


def test_not_an_id() -> None:
    with pytest.raises(ValueError, match="is not an id"):
        told("17")


def test_nothing_in_a_story_steers_the_terminal() -> None:
    failed = Entry(1, 1.0, SampleFailed(0, 0, 1, "it raised \x1b[2J\n       9.0 s  trained"), [])
    lines = render_story(story([*ENTRIES[:8], failed], "t0", CONFIG)).splitlines()
    assert lines[-1].endswith("it raised \\x1b[2J        9.0 s  trained")


def test_rendering_shows_virtual_time() -> None:
    assert render_story(story(ENTRIES, "p1", CONFIG)).splitlines()[0] == "       0.3 s  p1 pooled: 64 tokens"


def test_the_story_of_a_strangers_sample_says_who_checked_it_and_why_it_was_not_kept():
    settings = drive.config(prompts=3, strangers=Strangers(checkers=1, check_share=1.0), local=Local(replicas=2))
    fleet = drive.Drive(settings)
    entries: list[Entry] = []
    handle = fleet.plane.handle

    def recorded(now: float, event: Event) -> list[Command]:
        commands = handle(now, event)
        entries.append(Entry(len(entries) + 1, now, event, tuple(commands)))
        return commands

    fleet.plane.handle = recorded  # type: ignore[method-assign]
    fleet.join_all()
    fleet.tell(HostJoined(3, (7,), worker="mallory", salt=5))
    for event in (RelayJoined(3, 1), VersionStored(3, 1, 0), ReplicaJoined(7, 1, 3, 0, 10_000, 64)):
        fleet.tell(event)
    request = fleet.running(7)[0]
    fleet.tell(HandedIn(7, (fleet.meta(request),)))
    (checked,) = fleet.running(0)
    fleet.tell(CheckFailed(0, checked.trajectory, checked.attempt, "token 3 is another one"))
    told = [line.text for line in story(entries, f"t{request.trajectory}", settings)]
    assert "handed in by r7, a stranger's: 50 tokens, version 0" in told
    assert any(text.startswith("given to the checker r0 (attempt 2, version 0), to be scored again") for text in told)
    assert "failed its check on r0: token 3 is another one" in told
    assert any("mallory is quarantined: t" in line.text for line in story(entries, "r7", settings))
