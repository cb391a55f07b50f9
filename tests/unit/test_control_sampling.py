"""The staleness bound is kept by `pick`, whatever admission let in; admission saves work."""

import pytest

from tailrace.config.tree import Config, Schedule, Workload
from tailrace.control.ledger import Ledger
from tailrace.control.sampling import admits, doomed, mini_batch_sizes, pick
from tailrace.protocol import TrajectoryMeta
from tailrace.types import Prompt


def settings(**schedule):
    return Config(workload=Workload(prompts_per_step=2, group_size=1), schedule=Schedule(**schedule))


def ledger(*, ready=(), started=()):
    """One group per version given: complete, or still being generated."""
    book = Ledger()
    book.add_prompts([Prompt(id, 1) for id in range(len(ready) + len(started))])
    for version in (*ready, *started):
        group = book.open_group(0.0, 1)
        book.assign(group.samples[0], 0, version)
        if len(book.ready) < len(ready):
            book.finish(book.samples[group.samples[0]], TrajectoryMeta(group.samples[0], 1, 1, version, version))
            book.close(group, 1)
    return book


def ages(groups):
    return [group.oldest for group in groups]


@pytest.mark.parametrize("policy", ["drop", "wait"])
@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_nothing_older_than_the_bound_is_picked(policy, order):
    config = settings(max_staleness=2, staleness_policy=policy, order=order)
    picked = pick(config, ledger(ready=[3, 9, 7, 8]), 10, 2, 2)
    assert min(ages(picked.groups)) >= 8
    assert ages(picked.stale) == [3, 7]


def test_nothing_is_picked_before_there_is_enough_of_it():
    picked = pick(settings(max_staleness=2), ledger(ready=[3, 9]), 10, 2, 2)
    assert not picked.groups
    assert ages(picked.stale) == [3]


def test_fifo_takes_what_was_complete_first_and_freshest_what_is_newest():
    book = ledger(ready=[8, 9, 10])
    assert ages(pick(settings(order="fifo"), book, 10, 2, 2).groups) == [8, 9]
    assert ages(pick(settings(order="freshest"), book, 10, 2, 2).groups) == [10, 9]


def test_wait_keeps_the_places_of_what_only_this_step_can_take():
    config = settings(max_staleness=1, staleness_policy="wait")
    assert not pick(config, ledger(ready=[10, 10], started=[9]), 10, 2, 2).groups
    assert pick(config, ledger(ready=[10, 10], started=[10]), 10, 2, 2).groups
    assert pick(settings(max_staleness=1), ledger(ready=[10, 10], started=[9]), 10, 2, 2).groups  # drop does not wait


def test_wait_keeps_the_places_that_later_steps_will_not_have():
    """Version 9 is due by the next step, which has two places: of three open groups one needs a place in this step."""
    config = settings(max_staleness=2, staleness_policy="wait")
    assert not pick(config, ledger(ready=[10, 10], started=[9, 9, 9]), 10, 2, 2).groups
    assert pick(config, ledger(ready=[10, 10], started=[9, 9]), 10, 2, 2).groups
    assert pick(config, ledger(ready=[9, 9], started=[9, 9, 9]), 10, 2, 2).groups, "nothing that is open is more urgent"


def test_wait_takes_the_earliest_deadline_first():
    config = settings(max_staleness=2, staleness_policy="wait", order="freshest")
    assert ages(pick(config, ledger(ready=[10, 8, 9]), 10, 2, 2).groups) == [8, 9]


def test_work_that_no_step_could_take_is_doomed():
    book = ledger(started=[3, 8])
    assert ages(doomed(settings(max_staleness=2), book, 10)) == [3]
    assert not doomed(settings(max_staleness=2, staleness_policy="wait"), book, 10)


def test_admission_counts_what_is_open_ready_and_in_the_step():
    book = ledger(ready=[0], started=[0])
    assert admits(settings(max_staleness=2), book, taken=1) == 2 * 2 - 3, "half of the bound is started ahead"
    assert admits(settings(max_staleness=2, steps_ahead=0.5), book, taken=1) == 0


def test_a_group_that_is_open_holds_its_place_and_a_ready_one_does_not():
    book = ledger(ready=[0, 0], started=[0])
    assert admits(settings(max_staleness=8, max_open=2), book, taken=0) == 1
    assert admits(settings(max_staleness=8, max_open=1), book, taken=0) == 0


def test_weights_that_are_too_old_already_start_nothing():
    assert admits(settings(max_staleness=1), Ledger(), 0, lag=1) == 3
    assert admits(settings(max_staleness=1), Ledger(), 0, lag=2) == 0


def test_under_wait_old_weights_start_only_what_comes_in_time():
    assert admits(settings(max_staleness=1, staleness_policy="wait"), Ledger(), 0, lag=1) == 2


def test_mini_batches_are_as_even_as_possible():
    assert mini_batch_sizes(10, 4) == [3, 3, 2, 2]
