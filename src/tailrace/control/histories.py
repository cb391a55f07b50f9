"""What is remembered of prompts whose samples all got the same reward, and how likely each is to be visited again.

GRESO (arXiv 2506.02177): a prompt whose last z visits were all alike (all right, or all wrong) is visited with chance
`base ** z`, never less than `explore`. One base for easy prompts and one for hard ones; after every step each moves
towards its target share of such groups. One useful visit clears a prompt's history.

A visit that is under way, of which nothing is known yet or which is not trained yet, counts as one more of them: the
policy that would answer is the same. Otherwise, where few prompts are left that teach anything and all others are
skipped, these few would be visited dozens of times in one step.

A row of the data has one byte: its streak, 0 for none, and the sign that tells easy from hard. Rows beyond the bound
(`filters.rows`) have no history: only visits under way count there.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.config.tree import Filters
from tailrace.types import Prompt, PromptId, RowId

Outcome = Literal["easy", "hard", "useful"]  # of a group: all right, all wrong, or neither
LONGEST = 100  # streak; with any base that is allowed, the chance of a visit is at its floor long before
HARD = 128  # bit of a byte that marks a streak of hard visits
LOWEST, HIGHEST = 0.05, 0.95  # a base stays between these
RECENT = 64  # groups, or prompts, over which a share is a mean
MASK = (1 << 64) - 1


class PromptHistory(msgspec.Struct):
    streaks: bytearray = msgspec.field(default_factory=bytearray)  # by row
    easy_base: float = 0.5
    hard_base: float = 0.5
    easy: int = 0  # groups of the present step that turned out so
    hard: int = 0
    closed: int = 0  # groups of the present step, whatever they turned out to be
    useful_share: float = 1.0  # of recent groups
    visited_share: float = 1.0  # of recent prompts: the others were skipped

    def streak(self, row: RowId) -> int:
        """How many visits in a row were easy; negative: hard."""
        value = self.streaks[row] if 0 <= row < len(self.streaks) else 0
        return HARD - value if value > HARD else value

    def note(self, row: RowId, outcome: Outcome, rows: int) -> None:
        """A group of this row has closed."""
        self.closed += 1
        self.easy += outcome == "easy"
        self.hard += outcome == "hard"
        self.useful_share += ((outcome == "useful") - self.useful_share) / RECENT
        if 0 <= row < rows:
            self._set(row, _next(self.streak(row), outcome))

    def _set(self, row: RowId, streak: int) -> None:
        if streak and row >= len(self.streaks):
            self.streaks.extend(bytes(row + 1 - len(self.streaks)))
        if row < len(self.streaks):
            self.streaks[row] = HARD - streak if streak < 0 else streak

    def skips(self, seed: int, prompt: Prompt, under_way: int, settings: Filters) -> bool:
        """Whether this visit is left out. A prompt's number stands for row and visit: every epoch has its own. What is
        being trained on is expected to become easy."""
        streak = self.streak(prompt.row)
        base = self.hard_base if streak < 0 else self.easy_base
        alike = abs(streak) + under_way
        visited = not alike or draw(seed, prompt.id) < max(base**alike, settings.explore)
        self.visited_share += (visited - self.visited_share) / RECENT
        return not visited

    def tune(self, settings: Filters) -> None:
        """A step is trained: skip more where its share of such groups was above the target, less where it was below."""
        if self.closed:
            easy = settings.target * settings.easy_share
            self.easy_base = _moved(self.easy_base, self.easy / self.closed, easy, settings.rate)
            self.hard_base = _moved(self.hard_base, self.hard / self.closed, settings.target - easy, settings.rate)
        self.easy = self.hard = self.closed = 0


def _next(streak: int, outcome: Outcome) -> int:
    if outcome == "useful":
        return 0
    sign = 1 if outcome == "easy" else -1
    return sign * min(LONGEST, max(0, sign * streak) + 1)


def _moved(base: float, share: float, target: float, rate: float) -> float:
    return min(HIGHEST, max(LOWEST, base - rate if share > target else base + rate))


def draw(seed: int, prompt: PromptId) -> float:
    """A number in [0, 1) that depends on these two alone (the mixing function of SplitMix64)."""
    value = (seed * 0x9E3779B97F4A7C15 + prompt + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return (value ^ value >> 31) / (1 << 64)
