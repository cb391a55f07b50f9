"""How long samples will become, from those that have finished."""

import math
import random

import pytest

from tailrace.control.estimates import EARLIER, EarlierLengths, LengthEstimates
from tailrace.control.ledger import Ledger
from tailrace.types import Prompt


def learned(correlation, groups=600, size=16, sigma=1.0, seed=0):
    """Told of groups whose log lengths have a mean of 7; what is left of the spread is within groups."""
    draw, known = random.Random(seed), LengthEstimates()
    for _ in range(groups):
        prompt = draw.gauss(0, math.sqrt(correlation) * sigma)
        logs = [7 + prompt + draw.gauss(0, math.sqrt(1 - correlation) * sigma) for _ in range(size)]
        for index, value in enumerate(logs):
            known.note_sample(value, sum(logs[:index]), index)
        known.note_group(logs)
    return known


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5, 0.8])
def test_how_alike_samples_of_a_prompt_are_is_found(correlation):
    assert learned(correlation).correlation == pytest.approx(correlation, abs=0.12)


def test_siblings_tell_as_much_as_they_are_alike():
    assert learned(0.5).error < 0.85 * learned(0.5).error_of_mean
    assert learned(0.0).error == pytest.approx(learned(0.0).error_of_mean, rel=0.05), "nothing, if they are not"


def test_a_sample_of_a_long_group_is_expected_to_go_on_for_longer():
    known, most = learned(0.5), 100_000
    short = known.residual(100, 8 * math.log(200), 8, most)
    long = known.residual(100, 8 * math.log(8000), 8, most)
    assert long > 4 * short


def test_what_has_lasted_long_goes_on_for_long():
    known = learned(0.5)
    left = [known.residual(tokens, 0.0, 0, 10**6) for tokens in (1, 2_000, 20_000, 200_000)]
    assert left == sorted(left)


def test_nobody_is_expected_to_outgrow_the_most():
    assert learned(0.5).residual(15_990, 0.0, 0, 16_000) == 10


def test_before_anything_has_finished_age_is_all_that_is_known():
    assert LengthEstimates().residual(300, 0.0, 0, 16_000) == 300


def test_the_expectation_is_right_on_average():
    """Over many samples that are still running at a length, what they get yet is what was foretold."""
    known, draw = learned(0.0), random.Random(1)
    lengths = [math.exp(7 + draw.gauss(0, 1)) for _ in range(200_000)]
    for tokens in (50, 1_000, 5_000):
        left = [length - tokens for length in lengths if length > tokens]
        assert known.residual(tokens, 0.0, 0, 10**6) == pytest.approx(sum(left) / len(left), rel=0.2)


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_how_much_is_in_groups_that_end_within_a_limit(correlation):
    known, draw, size, limit = learned(correlation), random.Random(1), 8, 4_000
    kept = spent = 0.0
    for _ in range(20_000):
        prompt = draw.gauss(7, math.sqrt(correlation))
        lengths = [math.exp(prompt + draw.gauss(0, math.sqrt(1 - correlation))) for _ in range(size)]
        spent += sum(min(length, limit) for length in lengths)
        kept += sum(lengths) if max(lengths) <= limit else 0.0
    assert known.useful_share(limit, size, 10**6) == pytest.approx(kept / spent, abs=0.06)


def test_all_is_useful_where_no_sample_can_be_longer_and_nothing_where_there_is_no_time():
    assert (learned(0.5).useful_share(16_000, 8, 16_000), learned(0.5).useful_share(0.5, 8, 16_000)) == (1.0, 0.0)


def test_a_prompt_that_was_long_at_its_last_visit_is_expected_to_be_long_again():
    known, visits = learned(0.5), EarlierLengths()
    visits.note(3, math.log(8000))
    count, total = visits.evidence(3)
    assert count == EARLIER
    assert math.exp(total / count) == pytest.approx(8000, rel=0.05)
    assert known.residual(100, total, count, 100_000) > 2 * known.residual(100, 0.0, 0, 100_000)


def test_rows_without_a_visit_or_beyond_the_bound_have_no_memory():
    visits = EarlierLengths()
    visits.note(-1, 5.0)
    visits.note(1 << 40, 5.0)
    visits.note(2, 0.0)
    assert visits.evidence(1 << 40) == visits.evidence(-1) == visits.evidence(0) == (0.0, 0.0)
    assert len(visits.by_row) == 3
    assert visits.evidence(2) == (EARLIER, 0.0), "one token is a length as well"


def test_prompts_that_come_together_are_opened_longest_first_and_never_after_later_ones():
    book = Ledger(lengths=learned(0.5))
    book.visits.note(1, math.log(9000))
    book.visits.note(2, math.log(20))
    book.add_prompts([Prompt(0, 1, row=2), Prompt(1, 1, row=0), Prompt(2, 1, row=1)], longest_first=True)
    book.add_prompts([Prompt(3, 1, row=1)], longest_first=True)
    assert [book.open_group(0.0, 1).prompt.id for _ in range(4)] == [2, 1, 0, 3]
