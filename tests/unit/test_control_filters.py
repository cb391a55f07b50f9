"""Prompts that teach nothing: skipped by their history, stopped early, filtered; and the same again after a restart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from drive import Drive, config
from tailrace.config.tree import SCHEDULES, Config, Filters, Groups, Schedule, Trainer
from tailrace.control import filters
from tailrace.control.histories import LONGEST, Outcome, PromptHistory, draw
from tailrace.control.plane import ControlPlane
from tailrace.control.state import Context
from tailrace.protocol import (
    ControllerRestarted,
    FetchPrompts,
    Finished,
    Forget,
    PromptsAdded,
    Request,
    SkipPrompts,
    Stop,
    Train,
)
from tailrace.types import Prompt

PINNED = 0.17037499043121127  # a resumed run draws what it would have drawn, also with a newer release
ALL = Groups(min_survivors=1, filter="all")


def driven(kind="trajectory", size=8, prompts=2, **sections) -> Drive:
    sections = {"filters": Filters(first_samples=4)} | sections
    return Drive(config(kind, prompts, size, groups=ALL, **sections), replicas=1).join_all()


def answer(drive: Drive, request: Request, reward: float) -> list:
    sample = drive.plane.state.ledger.samples[request.trajectory]
    meta = replace(drive.meta(request, sample.oldest), reward=reward)
    return drive.tell(Finished(sample.replica, meta))


def of_group(drive: Drive, group: int) -> list[Request]:
    return [request for request in drive.running() if request.group == group]


def answer_all(drive: Drive, group: int, reward: float) -> None:
    for request in of_group(drive, group):
        answer(drive, request, reward)


def put_into_row(drive: Drive, row: int) -> None:
    """As if the prompt of the first group were of this row of the data."""
    ledger = drive.plane.state.ledger
    ledger.groups[0].prompt = replace(ledger.groups[0].prompt, row=row)
    ledger.rows[row] = 1


def train(drive: Drive) -> None:
    """The trainer does what it was told, if anything, and the replica pulls what it made."""
    if drive.plane.state.training.busy:
        drive.train()
        drive.store_everywhere(drive.plane.state.training.version)
    if drive.plane.state.pulling:
        drive.load(0)


# --------------------------------------------------------------------------------------------------------------- during


def test_a_group_begins_with_three_quarters_of_its_samples_unless_told_otherwise():
    assert len(of_group(driven(filters=Filters()), 0)) == 6
    assert len(of_group(driven(filters=Filters(first_samples=5)), 0)) == 5


def test_a_prompt_whose_last_visit_was_useful_gets_all_of_its_samples_at_once():
    drive = driven(schedule=Schedule(max_inflight=64, steps_ahead=10))
    for outcome in ("useful", "hard"):
        drive.plane.state.history.note(7 if outcome == "useful" else 8, outcome, rows=100)
    start = drive.plane.state.ledger.received
    drive.tell(PromptsAdded(start, (Prompt(start, 10, 7), Prompt(start + 1, 10, 9))))
    sizes = {group.prompt.row: len(group.samples) for group in drive.plane.state.ledger.groups.values()}
    assert (sizes[7], sizes[9]) == (8, 4)


def test_a_group_gets_the_rest_of_its_samples_once_rewards_differ():
    drive = driven()
    first = of_group(drive, 0)
    assert [one.trajectory for one in first] == [0, 1, 2, 3]
    answer(drive, first[0], 1.0)
    assert len(drive.plane.state.ledger.groups[0].samples) == 4
    answer(drive, first[1], 0.0)
    assert drive.plane.state.ledger.groups[0].samples == list(range(8))


def test_a_group_that_is_all_right_is_stopped_and_its_place_goes_to_the_next_prompt():
    drive = driven(schedule=Schedule(max_inflight=8))
    opened = drive.plane.state.ledger.tally.started
    answer_all(drive, 0, 1.0)
    ledger = drive.plane.state.ledger
    assert drive.orders(Forget) == [Forget((0, 1, 2, 3), "stopped")]
    assert (ledger.tally.stopped, ledger.unstarted, ledger.tally.filtered) == (1, 4, 0)
    assert ledger.tally.started > opened


def test_samples_are_added_while_all_are_wrong_until_the_first_right_one():
    drive = driven()
    answer_all(drive, 0, 0.0)
    assert [one.trajectory for one in of_group(drive, 0)] == [4, 5]
    answer(drive, of_group(drive, 0)[0], 1.0)
    assert drive.plane.state.ledger.groups[0].samples == list(range(8))
    answer_all(drive, 1, 0.0)
    answer_all(drive, 1, 0.0)
    answer_all(drive, 1, 0.0)
    assert drive.orders(Forget)[-1] == Forget(tuple(range(8, 16)), "filtered")


def test_a_prompt_that_was_all_wrong_last_time_gets_its_first_samples_only():
    drive = driven()
    drive.plane.state.history.streaks = bytearray([129])
    put_into_row(drive, 0)
    answer_all(drive, 0, 0.0)
    assert drive.orders(Forget)[-1] == Forget((0, 1, 2, 3), "stopped")
    assert drive.plane.state.history.streak(0) == -2


@pytest.mark.parametrize("finished", [3, 4])
def test_a_group_that_is_dropped_for_its_age_counts_in_the_history_once_its_first_samples_are_done(finished):
    schedule = Schedule(kind="partial", max_inflight=32, steps_ahead=10, max_staleness=1)
    drive = driven("partial", prompts=1, schedule=schedule)
    start = drive.plane.state.ledger.received
    put_into_row(drive, 0)
    drive.tell(PromptsAdded(start, tuple(Prompt(start + i, 10, 1 + i) for i in range(8))))
    for request in of_group(drive, 0)[:finished]:
        answer(drive, request, 0.0)
    while others := [request for request in drive.running() if request.group]:
        answer(drive, others[0], float(others[0].trajectory % 2))
        train(drive)
        if drive.plane.state.ledger.tally.dropped_stale:
            break
    assert 0 not in drive.plane.state.ledger.groups
    assert drive.plane.state.history.streak(0) == (-1 if finished == 4 else 0)


def test_the_order_in_which_samples_finish_does_not_matter_for_what_is_started():
    """Else short answers, which finish first, would be favoured."""
    rewards = {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        drive = driven()
        by_number = {one.trajectory: one for one in of_group(drive, 0)}
        for number in order:
            answer(drive, by_number[number], rewards[number])
        assert drive.plane.state.ledger.groups[0].samples == list(range(8))


@pytest.mark.parametrize("most", [0.0, 2.0])
def test_of_many_wrong_samples_only_some_are_trained_on(most):
    drive = driven(prompts=1, filters=Filters(wrong_per_right=most))
    answer(drive, of_group(drive, 0)[3], 1.0)
    answer_all(drive, 0, 0.0)
    answer_all(drive, 0, 0.0)
    (order,) = drive.orders(Train)
    kept = (0, 1, 3) if most else tuple(range(8))
    assert order.groups[0].trajectories == kept
    assert order.groups[0].left_out == (0.0,) * (8 - len(kept))


def test_with_a_beta_posterior_a_group_that_is_all_right_is_trained_on():
    drive = driven(prompts=1, trainer=Trainer(mini_batches=1, advantage="beta"))
    answer_all(drive, 0, 1.0)
    (order,) = drive.orders(Train)
    assert order.groups[0].trajectories == (0, 1, 2, 3)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_trains_on_useful_groups_alone(kind):
    schedule = Schedule(kind=kind, max_inflight=64, steps_ahead=1 if kind == "stream" else None)
    drive = driven(kind, size=4, schedule=schedule)
    for _ in range(200):
        if drive.plane.state.fetching:
            drive.fetch()
        for request in drive.running()[:1]:
            answer(drive, request, [0.0, 1.0, request.trajectory % 2][request.group % 3])
        trained = drive.orders(Train)
        if len(trained) >= 2:
            break
        train(drive)
    groups = [group for order in drive.orders(Train)[:1] for group in order.groups]
    assert groups
    assert all(group.group % 3 == 2 for group in groups)


# ---------------------------------------------------------------------------------------------------------- all in vain


def hopeless(limit: int) -> Drive:
    """Groups end one after the other, and all of them are all right or all wrong."""
    drive = driven(size=4, filters=Filters(), schedule=Schedule(max_inflight=64, steps_ahead=10))
    drive.plane = ControlPlane(replace(drive.plane.config, groups=replace(ALL, max_filtered=limit)), drive.plane.state)
    for _ in range(300):
        if drive.orders(Stop):
            break
        if drive.plane.state.fetching:
            drive.fetch()
        for request in drive.running()[:1]:
            answer(drive, request, float(request.group % 2))
    return drive


def test_a_run_that_finds_nothing_to_learn_ends_and_says_why():
    drive = hopeless(limit=10)
    (stop,) = drive.orders(Stop)
    assert stop.failed
    assert "none of the last 10 groups" in stop.reason
    assert "all right in 5 of them and all wrong in 5" in stop.reason
    assert not hopeless(limit=0).orders(Stop)


def test_a_run_that_found_nothing_to_learn_can_be_resumed():
    drive = hopeless(limit=10)
    drive.tell(ControllerRestarted())
    assert not drive.plane.state.stopped
    assert not filters.why_hopeless(Context(drive.plane.config, drive.plane.state))


def test_one_group_that_teaches_something_is_enough_to_go_on():
    history = PromptHistory()
    for outcome in ("easy", "hard", "hard"):
        history.note_end(outcome, teaches=False)
    assert (history.easy_in_vain, history.hard_in_vain) == (1, 2)
    history.note_end("easy", teaches=True)  # with a Beta posterior
    assert (history.easy_in_vain, history.hard_in_vain) == (0, 0)


# --------------------------------------------------------------------------------------------------------------- before


def test_one_useful_visit_clears_a_history_and_the_other_kind_begins_a_new_one():
    history = PromptHistory()
    visits: list[Outcome] = ["easy", "easy", "hard", "hard", "useful", "hard"]
    for outcome, streak in zip(visits, (1, 2, -1, -2, 0, -1), strict=True):
        history.note(7, outcome, rows=100)
        assert history.streak(7) == streak
    for _ in range(2 * LONGEST):
        history.note(7, "hard", rows=100)
    assert history.streak(7) == -LONGEST


def test_a_history_takes_a_byte_a_row_up_to_its_bound():
    history = PromptHistory()
    for row in (-1, 3, 99, 100, 10**12):
        history.note(row, "hard", rows=100)
    assert len(history.streaks) == 100
    assert [history.streak(row) for row in (-1, 3, 99, 100)] == [0, -1, -1, 0]
    assert not history.skips(0, Prompt(5, 10, row=100), 0, Filters())


def test_the_longer_a_streak_the_more_visits_are_skipped_but_never_all():
    history, settings = PromptHistory(), Filters()
    history.streaks = bytearray([0, 1, 2, 100])
    skipped = [skipped_share(history, row, 0, settings) for row in range(4)]
    assert skipped[0] == 0.0
    assert skipped[1:] == pytest.approx([0.5, 0.75, 0.99], abs=0.03)


def skipped_share(history: PromptHistory, row: int, under_way: int, settings: Filters) -> float:
    """Of a visit in each of so many steps."""
    skipped = 0
    for _ in range(2000):
        skipped += history.skips(0, Prompt(0, 10, row), under_way, settings)
        history.step, history.looked_at = history.step + 1, 0
    return skipped / 2000


def test_visits_under_way_count_as_visits_that_teach_nothing():
    history, settings = PromptHistory(), Filters()
    history.streaks = bytearray([0, 1])
    skipped = [skipped_share(history, row, under_way, settings) for row in range(2) for under_way in (1, 2, 100)]
    assert skipped == pytest.approx([0.5, 0.75, 0.99, 0.75, 0.875, 0.99], abs=0.03)


def of_few_rows(streaks: list[int], useful_share: float) -> Drive:
    """16 groups are open, and a step needs 8 useful ones."""
    drive = driven(prompts=8, schedule=Schedule(max_inflight=480, steps_ahead=100))
    history = drive.plane.state.history
    history.streaks, history.easy_base, history.useful_share = bytearray(streaks), 0.05, useful_share
    return drive


def fetch_all(drive: Drive, rows: int) -> dict[int, int]:
    """Until no more prompts are asked for. Returns how many groups of each row are under way."""
    for _ in range(200):
        if not drive.plane.state.fetching:
            return drive.plane.state.ledger.rows
        wanted = drive.orders(FetchPrompts)[-1]
        numbers = range(wanted.start, wanted.start + wanted.count)
        drive.tell(PromptsAdded(wanted.start, tuple(Prompt(id, 10, id % rows) for id in numbers)))
    raise AssertionError("prompts are asked for again and again")


def test_the_data_do_not_come_round_for_nothing_while_the_trainer_has_enough():
    """What is skipped stays skipped in this step; whatever its draw, it would be visited in the end otherwise."""
    rows = 400
    drive = of_few_rows([0] * 8 + [100] * (rows - 8), useful_share=1.0)
    under_way = fetch_all(drive, rows)
    assert all(under_way[row] == 1 for row in range(8))
    assert len(under_way) < 8 + 0.05 * rows
    assert drive.plane.state.ledger.received < 2 * rows


def test_once_the_data_have_come_round_two_steps_are_filled_with_the_likeliest_prompts():
    """Nothing is known of the first row, and little of the next ten."""
    rows = 100
    drive = of_few_rows([0, *[2] * 10, *[100] * (rows - 11)], useful_share=0.32)
    under_way = fetch_all(drive, rows)
    assert sum(under_way.values()) == 50 - 16  # 50 open ones have 16 useful ones among them
    assert under_way[0] >= 1
    assert sum(count for row, count in under_way.items() if row > 10) <= 2


def test_draws_are_even_and_depend_on_seed_and_prompt_alone():
    draws = [draw(seed, prompt) for seed in range(10) for prompt in range(1000)]
    assert draw(3, 14) == PINNED
    assert len(set(draws)) == len(draws)
    assert sum(draws) / len(draws) == pytest.approx(0.5, abs=0.01)
    assert sum(value < 0.1 for value in draws) / len(draws) == pytest.approx(0.1, abs=0.01)


def test_skipping_steers_towards_its_target():
    history, settings = PromptHistory(), Filters(target=0.3, easy_share=1 / 3, rate=0.01)
    counts: dict[Outcome, int] = {"easy": 2, "hard": 1, "useful": 7}
    for outcome, count in counts.items():
        for _ in range(count):
            history.note(-1, outcome, rows=0)
    history.tune(settings)
    assert (history.easy_base, history.hard_base) == (0.49, 0.51)
    history.tune(settings)  # nothing closed
    assert (history.easy_base, history.hard_base) == (0.49, 0.51)


def test_skipped_prompts_are_counted_and_more_are_fetched():
    drive = driven(schedule=Schedule(max_inflight=32, steps_ahead=10))
    drive.plane.state.history.streaks = bytearray([100] * 8)
    start = drive.plane.state.ledger.received
    commands = drive.tell(PromptsAdded(start, tuple(Prompt(start + i, 10, i) for i in range(8))))
    (skipped,) = [command for command in commands if isinstance(command, SkipPrompts)]
    assert drive.plane.state.ledger.skipped == len(skipped.prompts) >= 6
    assert set(skipped.streaks) == {100}
    assert any(isinstance(command, FetchPrompts) and command.start == start + 8 for command in commands)


# --------------------------------------------------------------------------------------------------------------- resume


def simulated() -> Config:
    settings = config("trajectory", 4, 4, groups=Groups(min_survivors=1, filter="all"))
    return replace(settings, schedule=Schedule(max_inflight=32))


def played(drive: Drive, events: int, rows: int = 7) -> None:
    """Finish one sample after the other; a third of the rows too hard, a third too easy."""
    for _ in range(events):
        wanted = drive.orders(FetchPrompts)[-1]
        if drive.plane.state.fetching:
            numbers = range(wanted.start, wanted.start + wanted.count)
            drive.tell(PromptsAdded(wanted.start, tuple(Prompt(id, 10, id % rows) for id in numbers)))
        for request in drive.running()[:1]:
            answer(drive, request, [0.0, 1.0, request.trajectory % 2][request.prompt % rows % 3])
        train(drive)


def test_a_restored_control_plane_goes_on_with_the_same_decisions():
    drive = Drive(simulated(), replicas=1).join_all()
    played(drive, 150)
    assert drive.plane.state.ledger.skipped
    assert drive.plane.state.ledger.tally.stopped
    before, snapshot = len(drive.sent), drive.plane.snapshot()
    played(drive, 100)
    straight = drive.sent[before:]
    again = Drive(simulated(), replicas=1).join_all()
    played(again, 150)
    again.plane = ControlPlane.restore(again.plane.config, snapshot)
    played(again, 100)
    assert again.sent[before:] == straight
    assert any(isinstance(command, SkipPrompts) for command in straight)
