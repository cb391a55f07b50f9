"""How often prompts are solved in a simulation: a success rate per row of the data, which grows with training.

A share of the rows is too easy, a share too hard, the others are useful: three Beta laws. All of it depends on the
seed, the row and the sample alone, so every schedule and every filter meets the same prompts.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, log
from random import Random

from tailrace.config.tree import Config
from tailrace.protocol import Request

EASY, USEFUL, HARD = (40.0, 1.0), (2.0, 2.0), (1.0, 40.0)  # parameters of the Beta laws
LARGEST = 50.0  # log-odds


class SuccessLaw:
    def __init__(self, config: Config) -> None:
        self._difficulty, self._seed = config.workload.difficulty, config.run.seed
        self._log_odds = lru_cache(maxsize=1 << 16)(self._drawn)

    def row(self, prompt: int) -> int:
        """The rows come up one after the other, again and again."""
        return prompt % self._difficulty.rows if self._difficulty.rows else -1

    def reward(self, request: Request, step: int) -> float | None:
        """Of a sample that is started at this step of training; None: nothing is known of difficulty."""
        if not self._difficulty.rows:
            return None
        draw = Random(f"reward {self._seed} {request.trajectory} {request.failures}").random()
        return float(draw < self.success_rate(self.row(request.prompt), step))

    def success_rate(self, row: int, step: int) -> float:
        odds = self._log_odds(row) + self._difficulty.drift_per_step * step
        return 1.0 / (1.0 + exp(-max(-LARGEST, min(LARGEST, odds))))

    def _drawn(self, row: int) -> float:
        """The log-odds of success at the start of training."""
        draw, shares = Random(f"difficulty {self._seed} {row}"), self._difficulty
        place = draw.random()
        law = EASY if place < shares.easy else HARD if place < shares.easy + shares.hard else USEFUL
        rate = min(max(draw.betavariate(*law), 1e-12), 1.0 - 1e-12)
        return log(rate / (1.0 - rate))
