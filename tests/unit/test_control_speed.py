"""What generating costs, fitted to what engines report of themselves."""

import random
from itertools import pairwise
from math import inf

import pytest

from tailrace.control.speed import DecodeCosts, Speed
from tailrace.protocol import EngineWork

TRUE = DecodeCosts(step=0.011, sequence=3e-5, kv_token=2e-8, prefill_token=2.5e-5)


def reports(costs, count, seed=0):
    """Of one engine that does what it is given at random."""
    draw, sums = random.Random(seed), [0.0, 0, 0, 0, 0]
    for _ in range(count):
        steps, running, prefill = draw.randint(10, 90), draw.randint(1, 300), draw.randint(0, 20_000)
        kv = running * draw.randint(100, 9_000)
        done = (steps, steps * running, steps * kv, prefill)
        seconds = sum(cost * amount for cost, amount in zip(costs, done, strict=True))
        sums = [sums[0] + seconds, *[a + b for a, b in zip(sums[1:], done, strict=True)]]
        yield EngineWork(*sums)


def told(*engines):
    speed = Speed()
    for engine in engines:
        before = None
        for work in engine:
            speed.note(before, work)
            before = work
    return speed.costs()


def test_the_costs_of_a_fleet_are_found():
    found = told(reports(TRUE, 40), reports(TRUE, 40, seed=1))
    assert found == pytest.approx(TRUE, rel=1e-3)


def test_they_follow_a_fleet_that_has_become_slower():
    slower = DecodeCosts(*[2 * cost for cost in TRUE])
    assert told(reports(TRUE, 100), reports(slower, 4000)) == pytest.approx(slower, rel=0.01)


def test_nothing_is_known_before_anything_was_done():
    assert Speed().costs() is None
    assert told([EngineWork(0.0, 0, 0, 0, 0)]) is None


def test_no_cost_is_negative():
    """Work that seems to save time is left out of the fit."""
    found = told([EngineWork(1.0, 100, 100, 0, 0), EngineWork(1.9, 200, 400, 0, 0)])
    assert found is not None
    assert min(found) >= 0
    assert found.step_s(1, 0) > 0


def test_a_report_from_before_a_restart_does_not_count():
    speed = Speed()
    speed.note(EngineWork(9.0, 900, 900, 900, 900), EngineWork(1.0, 100, 100, 100, 100))
    assert speed.costs() is None


def test_decoding_is_faster_in_company():
    assert TRUE.rate(64, 64 * 2000) > 20 * TRUE.rate(1, 2000)
    assert TRUE.rate(0, 0) == 0


IMPOSSIBLE = {
    "in no time": [EngineWork(5e-324 * n, n, n, n, n) for n in range(20)],
    "without a step": [EngineWork(1e-3 * n, 0, n, 0, 0) for n in range(20)],
}


@pytest.mark.parametrize("claim", IMPOSSIBLE)
def test_what_an_engine_cannot_have_done_is_reckoned_with_all_the_same(claim):
    """A stranger may say anything of itself, and control goes on."""
    speed, claims = Speed(), IMPOSSIBLE[claim]
    for before, after in pairwise(claims):
        speed.note(before, after)
    for usual in (TRUE, DecodeCosts(0.1, 0.0, 1e-7, 1e-12)):
        costs = speed.costs_near(usual)
        assert costs is None or 0.0 < costs.rate(10, 1000) < inf
