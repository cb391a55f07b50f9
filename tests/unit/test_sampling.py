"""Drawing tokens: random numbers that depend on the place alone, and the distribution that is really drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailrace.config.tree import Sampling
from tailrace.engines.sampling import sample, uniform

LOGITS = torch.randn(8, 200, generator=torch.Generator().manual_seed(1)) * 3


def draw(logits: torch.Tensor, count: int, **sampling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` draws from one row of logits, each at a place of its own."""
    settings = Sampling(**sampling)  # pyright: ignore[reportArgumentType]
    tokens, logprobs = sample(logits.expand(count, -1), 5, [3] * count, range(count), settings)
    return torch.tensor(tokens), torch.tensor(logprobs)


def test_the_random_number_of_a_place_never_changes() -> None:
    found = uniform(2026, [0, 17, 17, 2**40], [0, 5, 6, 9999])
    expected = [0.39215728566775665, 0.9892212090501791, 0.7600793868987569, 0.11758708595740641]
    assert found.tolist() == expected


def test_random_numbers_are_uniform_and_unrelated() -> None:
    trajectories, positions = np.meshgrid(np.arange(100), np.arange(500))
    numbers = uniform(0, trajectories.ravel(), positions.ravel()).reshape(500, 100)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 2500) ** 2 / 2500).sum() < 45  # chi-squared with 19 degrees of freedom, p < 0.001
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_a_row_is_drawn_the_same_alone_and_in_any_batch() -> None:
    settings = Sampling(temperature=0.8, top_p=0.9, top_k=50)
    together = sample(LOGITS, 1, range(8), range(100, 108), settings)
    backwards = sample(LOGITS.flip(0), 1, range(7, -1, -1), range(107, 99, -1), settings)
    assert backwards[0][::-1].tolist() == together[0].tolist()
    for row in range(8):
        tokens, logprobs = sample(LOGITS[row : row + 1], 1, [row], [100 + row], settings)
        assert tokens == [together[0][row]]
        assert logprobs == pytest.approx([together[1][row]], abs=1e-6)


def test_frequencies_follow_the_tempered_distribution() -> None:
    probabilities = (LOGITS[0] / 1.5).softmax(-1)
    tokens, logprobs = draw(LOGITS[0], 20000, temperature=1.5)
    found = torch.bincount(tokens, minlength=200) / 20000
    assert (found - probabilities).abs().max() < 0.012
    torch.testing.assert_close(logprobs.exp(), probabilities[tokens], atol=1e-6, rtol=1e-5)


def test_top_k_and_top_p_leave_the_likeliest_and_renormalise() -> None:
    ranked = LOGITS[0].argsort(descending=True)
    tokens, logprobs = draw(LOGITS[0], 4000, top_k=5)
    assert set(tokens.tolist()) == set(ranked[:5].tolist())
    expected = LOGITS[0][ranked[:5]].log_softmax(-1)
    for place, token in enumerate(ranked[:5].tolist()):
        assert float(logprobs[tokens == token].mean()) == pytest.approx(float(expected[place]), abs=1e-5)
    mass = LOGITS[0].softmax(-1)[ranked].cumsum(0)
    inside = int((mass < 0.6).sum()) + 1
    tokens, _ = draw(LOGITS[0], 6000, top_p=0.6)
    assert set(tokens.tolist()) == set(ranked[:inside].tolist())


def test_a_flat_nucleus_wider_than_the_first_look_is_still_right() -> None:
    flat = torch.linspace(0, 1e-3, 5000)
    tokens, _ = draw(flat, 1000, top_p=0.9)
    assert tokens.min() >= 490
    assert tokens.min() < 560


def test_temperature_zero_takes_the_likeliest_with_its_plain_logprob() -> None:
    tokens, logprobs = sample(LOGITS, 0, range(8), [0] * 8, Sampling(temperature=0))
    assert tokens.tolist() == LOGITS.argmax(-1).tolist()
    assert logprobs == pytest.approx(LOGITS.log_softmax(-1).amax(-1).tolist(), abs=1e-5)


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(FloatingPointError, match="diverged"):
        draw(torch.full((10,), torch.nan), 1)
