"""Hostile inputs: valid messages and files with something done to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

VALUES = 0.5  # share of inputs in which a value is changed; in the rest it is bytes

Decode = Callable[[bytes], bool | None]  # False: refused without an error, as a hub ignores what is not for it


class Decoder(NamedTuple):
    """What is attacked, with what, and what it may say."""

    name: str
    share: float  # of all inputs
    form: str  # msgpack, json or bytes: what the seeds are
    prepare: Callable[[Path], tuple[list[bytes], Decode]]
    errors: tuple[type[Exception], ...]


NUMBERS = [0, -1, 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, -0.0, 5e-324, float("nan"), float("inf")]
LENGTHS = [b"\0", b"\xff", b"\x7f\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\0" * 8, b"\0\0\0\x80"]
WORDS = ["", "\0", "x" * 300, "../../etc/passwd", "/etc/passwd", "a/../b", "\udfff"[:0], "é" * 40, "true", "-1", "1e9"]
DEPTHS = (3, 40, 500, 3000)


def damaged(random: Random, seeds: list[bytes]) -> bytes:
    data = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        _damage(random, data, seeds)
    return bytes(data)


def _damage(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    place = random.randrange(len(data) + 1)
    span = min(len(data) - place, random.choice((1, 2, 4, 8, 64, 1024)))
    match random.randrange(9):
        case 0:
            if place < len(data):
                data[place] ^= 1 << random.randrange(8)
        case 1:
            del data[place:]
        case 2:
            del data[place : place + span]
        case 3:
            data[place:place] = data[place : place + span] * random.choice((1, 2, 50))
        case 4:
            data[place:place] = random.randbytes(random.choice((1, 4, 32)))
        case 5:
            length = random.choice(LENGTHS)
            data[place : place + len(length)] = length
        case 6:
            other = random.choice(seeds)
            start = random.randrange(len(other) + 1)
            data[place:] = other[start : start + 4096]
        case 7:
            data[place : place + span] = bytes([random.choice((0, 0x22, 0x5B, 0x7B, 0x91, 0xC1, 0xFF))]) * span
        case _:
            data[place : place + 1] = random.choice((b"\x91", b"[", b"\x81\xa1x", b'{"x":')) * random.choice(DEPTHS)


def changed(random: Random, trees: list[Any], form: str) -> bytes:
    """A value somewhere in a valid message replaced, and written down again."""
    tree = random.choice(trees)
    for _ in range(random.choice((1, 1, 2, 4))):
        tree = _change(random, tree, trees, form)
    return written(tree, form)


def _change(random: Random, value: Any, trees: list[Any], form: str) -> Any:
    """A copy with one place changed; the deeper, the likelier."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if random.random() < 0.05:
            return {**value, random.choice(WORDS): random.choice(list(value.values()))}
        return {**value, key: _change(random, value[key], trees, form)}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        if random.random() < 0.1:
            return value * random.choice((0, 2, 100) if len(value) < 100 else (0, 2))
        return [*value[:place], _change(random, value[place], trees, form), *value[place + 1 :]]
    return _strange(random, trees, form)


def _strange(random: Random, trees: list[Any], form: str) -> Any:
    match random.randrange(8):
        case 0 | 1:
            return random.choice(NUMBERS)
        case 2:
            return random.choice(WORDS)
        case 3:
            return random.choice((None, True, False, [], {}, [None], {"": None}))
        case 4:
            return random.choice(trees)
        case 5:
            return "x" * random.choice((1000, 100_000))
        case 6:
            return [0] * random.choice((1000, 20_000))
        case _:
            nested: Any = 0
            for _ in range(random.choice((3, 40, 400))):
                nested = [nested] if random.random() < 0.5 else {"x": nested}
            return nested if form != "msgpack" or random.random() < 0.5 else b"\xff" * 100


def written(tree: Any, form: str) -> bytes:
    if form == "msgpack":
        return msgspec.msgpack.encode(tree)
    return json.dumps(tree, ensure_ascii=False).encode(errors="surrogatepass")


def inputs(decoder: Decoder, seeds: list[bytes], seed: int, first: int) -> Iterator[bytes]:
    """All inputs of a decoder, from number `first` on: each depends on its number alone."""
    read = {"msgpack": msgspec.msgpack.decode, "json": json.loads}.get(decoder.form)
    trees = [read(each) for each in seeds] if read else []
    number = first
    while True:
        random = Random(f"{seed} {decoder.name} {number}")
        if trees and random.random() < VALUES:
            yield changed(random, trees, decoder.form)
        else:
            yield damaged(random, seeds)
        number += 1
