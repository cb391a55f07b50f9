"""What is remembered of prompts whose samples all got the same reward, and how likely each is to be visited again.

GRESO (arXiv 2506.02177): a prompt whose last z visits were all alike (all right, or all wrong) is visited with chance
`base ** z`, never less than `explore`. One base for easy prompts and one for hard ones; after every step each moves
towards its target share of such groups. One useful visit clears a prompt's history.

A visit that is under way, of which nothing is known yet or which is not trained yet, counts as one more of them: the
policy that would answer is the same. Otherwise, where few prompts are left that teach anything and all others are
skipped, these few would be visited dozens of times in one step.

Where the data are few, they come round several times in a step. The draw of a row stays the same until the next step:
otherwise what is skipped would be visited all the same, a little chance at a time. Instead each round counts half as
many visits as the one before, so that what is likeliest to teach something comes first.

A row of the data has one byte: its streak and the sign that tells easy from hard, or that its last visit was useful; 0
as long as nothing is known. Rows beyond the bound (`filters.rows`) have no history: only visits under way count there.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.config.tree import Filters
from tailrace.types import Prompt, RowId

Outcome = Literal["easy", "hard", "useful"]  # of a group: all right, all wrong, or neither
LONGEST = 100  # streak; with any base that is allowed, the chance of a visit is at its floor long before
HARD = 128  # bit of a byte that marks a streak of hard visits
USEFUL = 127  # byte of a row whose last visit was useful
LOWEST, HIGHEST = 0.05, 0.95  # a base stays between these
RECENT = 64  # groups, or prompts, over which a share is a mean
MOST_ROUNDS = 32  # after which everything is visited
MASK = (1 << 64) - 1


class PromptHistory(msgspec.Struct):
    streaks: bytearray = msgspec.field(default_factory=bytearray)  # by row
    easy_base: float = 0.5
    hard_base: float = 0.5
    easy: int = 0  # groups of the present step that turned out so
    hard: int = 0
    closed: int = 0  # groups of the present step, whatever they turned out to be
    easy_in_vain: int = 0  # groups since the last one that was to be trained on
    hard_in_vain: int = 0
    useful_share: float = 1.0  # of recent groups
    visited_share: float = 1.0  # of recent prompts: the others were skipped
    step: int = 0  # steps so far
    looked_at: int = 0  # prompts in this step
    rows: int = 0  # of the data, as far as they have come up

    @property
    def rounds(self) -> int:
        """How often the data have come round in this step."""
        return max(0, self.looked_at - 1) // max(1, self.rows)

    def streak(self, row: RowId) -> int:
        """How many visits in a row were easy; negative: hard."""
        value = self._value(row)
        if value == USEFUL:
            return 0
        return HARD - value if value > HARD else value

    def was_useful(self, row: RowId) -> bool:
        return self._value(row) == USEFUL

    def _value(self, row: RowId) -> int:
        return self.streaks[row] if 0 <= row < len(self.streaks) else 0

    def note(self, row: RowId, outcome: Outcome, rows: int) -> None:
        """A group of this row has closed."""
        self.closed += 1
        self.easy += outcome == "easy"
        self.hard += outcome == "hard"
        self.useful_share += ((outcome == "useful") - self.useful_share) / RECENT
        if 0 <= row < rows:
            self.streaks.extend(bytes(max(0, row + 1 - len(self.streaks))))
            self.streaks[row] = _after(self.streak(row), outcome)

    def note_end(self, outcome: Outcome, teaches: bool) -> None:
        """A group will be trained on, or is left out because it teaches nothing."""
        self.easy_in_vain = 0 if teaches else self.easy_in_vain + (outcome == "easy")
        self.hard_in_vain = 0 if teaches else self.hard_in_vain + (outcome == "hard")

    def skips(self, seed: int, prompt: Prompt, under_way: int, settings: Filters) -> bool:
        """Whether this visit is left out. What is being trained on is expected to become easy."""
        self.looked_at, self.rows = self.looked_at + (prompt.row >= 0), max(self.rows, prompt.row + 1)
        streak = self.streak(prompt.row)
        base = self.hard_base if streak < 0 else self.easy_base
        alike = (abs(streak) + under_way) / (1 << min(self.rounds, MOST_ROUNDS))
        visited = not alike or draw(seed, self.step << 32 | prompt.row) < max(base**alike, settings.explore)
        self.visited_share += (visited - self.visited_share) / RECENT
        return not visited

    def tune(self, settings: Filters) -> None:
        """A step is trained: skip more where its share of such groups was above the target, less where it was below."""
        if self.closed:
            easy = settings.target * settings.easy_share
            self.easy_base = _moved(self.easy_base, self.easy / self.closed, easy, settings.rate)
            self.hard_base = _moved(self.hard_base, self.hard / self.closed, settings.target - easy, settings.rate)
        self.easy = self.hard = self.closed = 0
        self.step, self.looked_at = self.step + 1, 0


def _after(streak: int, outcome: Outcome) -> int:
    """The byte of a row after another visit."""
    if outcome == "useful":
        return USEFUL
    before = streak if outcome == "easy" else -streak
    return min(LONGEST, max(0, before) + 1) + (HARD if outcome == "hard" else 0)


def _moved(base: float, share: float, target: float, rate: float) -> float:
    return min(HIGHEST, max(LOWEST, base - rate if share > target else base + rate))


def draw(seed: int, number: int) -> float:
    """A number in [0, 1) that depends on these two alone (the mixing function of SplitMix64)."""
    value = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return (value ^ value >> 31) / (1 << 64)
