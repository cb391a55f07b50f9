"""Which known word a misspelt one was meant to be. A wrong suggestion is worse than none, so only typos count.

Two letters swapped are a misspelling of any word; a letter too many, too few or wrong only of a long one, and never the
first: `dpo` is not `ppo`, and `async` is not `sync`.
"""

from __future__ import annotations

from collections.abc import Iterable

SHORT = 5  # letters: one edit makes another word of so few, unless they are all that there is to choose from
LONG = 10  # letters: two edits are still a typo


def near(word: str, known: Iterable[str], short: int = SHORT) -> str | None:
    """The one known word that is a typo away from this; None where there is none, or several."""
    alike = [other for other in known if other[:1] == word[:1] and abs(len(other) - len(word)) <= 2]
    found = [(edit_distance(word, other), other) for other in alike]
    close = sorted(pair for pair in found if pair[0] <= _allowed(word, pair[1], short))
    if not close or (len(close) > 1 and close[0][0] == close[1][0]):
        return None
    return close[0][1]


def _allowed(word: str, other: str, short: int) -> int:
    if sorted(word) == sorted(other):
        return 1 + (len(word) >= LONG)
    shorter = min(len(word), len(other))
    return 0 if shorter <= short else 1 + (shorter >= LONG)


def edit_distance(one: str, other: str) -> int:
    """Damerau-Levenshtein distance: letters added, left out, replaced or swapped with their neighbour."""
    before, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        line = [row]
        for column, letter_there in enumerate(other, start=1):
            cost = min(last[column] + 1, line[-1] + 1, last[column - 1] + (letter != letter_there))
            swapped = row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == letter_there
            line.append(min(cost, before[column - 2] + 1) if swapped else cost)
        before, last = last, line
    return last[-1]
