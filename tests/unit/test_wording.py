"""Numbers of things in sentences."""

import pytest

from tailrace.wording import counted


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "mini-batch", "1 mini-batch"),
        (4, "mini-batch", "4 mini-batches"),
        (0, "relay", "0 relays"),
        (2000, "trajectory", "2,000 trajectories"),
        (3, "trainer rank", "3 trainer ranks"),
    ],
)
def test_a_noun_agrees_with_its_number(number, noun, words):
    assert counted(number, noun) == words
