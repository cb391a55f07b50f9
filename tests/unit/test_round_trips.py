"""How many decode steps one round trip to a GPU has."""

from __future__ import annotations

import pytest

from tailrace.engines.round_trips import FEWEST, RoundTrips


def after(rounds: int, tokens: int, ended: int, most: int = 32) -> RoundTrips:
    trips = RoundTrips(most)
    for _ in range(rounds):
        trips.note(tokens, ended)
    return trips


@pytest.mark.parametrize(("tokens_each", "steps"), [(2, FEWEST), (24, 12), (96, 24), (400, 32)])
def test_the_shorter_the_answers_the_fewer_steps_at_once(tokens_each: int, steps: int) -> None:
    assert after(50, tokens=10 * tokens_each, ended=10).steps == steps


def test_as_many_as_can_be_while_nothing_ends_and_again_once_only_a_long_tail_is_left() -> None:
    assert RoundTrips(32).steps == 32
    trips = after(50, tokens=240, ended=10)
    for _ in range(100):
        trips.note(tokens=32, ended=0)
    assert trips.steps == 32


def test_an_executor_of_single_steps_stays_one() -> None:
    assert after(50, tokens=10, ended=10, most=1).steps == 1
