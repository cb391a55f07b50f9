"""Sums of which a third is too easy, a third useful and a third too hard, for SmolLM2-135M: see mixed_sums.toml.

Too easy: whatever number is answered is right. Useful: two numbers of one digit. Too hard: a product of three numbers
of five digits. One sum in eight, by a hash of its text, is held out; held-out questions are all of the useful kind.
"""

import random
import zlib

from tailrace.envs.answers import as_number, final_answer
from tailrace.envs.base import Row, Scored, Turn

QUESTION = "State the final answer to the following arithmetic problem: {} ="
HELD_OUT = 256


class MixedSums:
    single_turn = True

    def __init__(self, options: dict, seed: int) -> None:
        self.rows, self.seed = options.get("rows", 480), seed

    def __len__(self) -> int:
        return self.rows

    def row(self, index: int) -> dict:
        generator = random.Random(f"train {self.seed} {index}")
        kind = index % 3
        if kind == 2:
            factors = [generator.randrange(10_000, 100_000) for _ in range(3)]
            product = factors[0] * factors[1] * factors[2]
            return {"prompt": QUESTION.format(" * ".join(map(str, factors))), "answer": str(product)}
        return useful(generator, held_out=False) | ({"answer": ""} if kind == 0 else {})

    def held_out(self) -> list[dict]:
        return [useful(random.Random(f"held out {index}"), held_out=True) for index in range(HELD_OUT)]

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        given, wanted = as_number(final_answer(transcript[-1].text, "0")), row.columns["answer"]
        return Scored(float(given is not None and (not wanted or given == as_number(wanted))))


def useful(generator: random.Random, held_out: bool) -> dict:
    while True:
        first, second, sign = generator.randrange(10), generator.randrange(10), generator.choice("+-")
        question = QUESTION.format(f"{first} {sign} {second}")
        if (zlib.crc32(question.encode()) % 8 == 0) == held_out:
            return {"prompt": question, "answer": str(first + second if sign == "+" else first - second)}
