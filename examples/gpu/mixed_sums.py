"""The sums of smollm2_sums.toml as a third of the prompts, between too easy and too hard ones: see mixed_sums.toml.

Too easy: the same questions, but whatever number is answered is right. Useful: two numbers of one digit, as in that
recipe. Too hard: six numbers of six digits. Held-out questions are all of the useful kind.
"""

from tailrace.envs.answers import as_number, final_answer
from tailrace.envs.base import Row, Scored, Turn
from tailrace.envs.reasoning import ReasoningGym


class MixedSums:
    single_turn = True

    def __init__(self, options: dict, seed: int) -> None:
        self.rows, held_out = options.get("rows", 480), options.get("held_out", 256)
        self.useful, self.hard = sums(self.rows, 2, 1, seed, held_out), sums(self.rows, 6, 6, seed, 0)

    def __len__(self) -> int:
        return self.rows

    def row(self, index: int) -> dict:
        """Too easy, useful and too hard in turn."""
        kind = index % 3
        return (self.hard if kind == 2 else self.useful).row(index) | {"kind": kind}

    def held_out(self) -> list[dict]:
        return [row | {"kind": 1} for row in self.useful.held_out()]

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        if row.columns["kind"] == 0:
            return Scored(float(as_number(final_answer(transcript[-1].text, "0")) is not None))
        return (self.hard if row.columns["kind"] == 2 else self.useful).respond(row, transcript)


def sums(rows: int, terms: int, digits: int, seed: int, held_out: int) -> ReasoningGym:
    shape = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
    return ReasoningGym({"dataset": "chain_sum", "size": rows, **shape}, seed, held_out)
