"""Differences between versions: exact however many there are, smaller where they can be, and refused where damaged."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relays import DEADLINE_S, Node, Weights, nodes, publish, until
from tailrace.weights import delta_transport
from tailrace.weights.checksum import PIECE
from tailrace.weights.delta import DeltaError, ElementWidths, decode, encode
from tailrace.weights.delta_transport import DeltaRates
from tailrace.weights.layout import WeightLayout

Bits = np.ndarray[Any, Any]


def weights(count: int, kind: str) -> Bits:
    drawn = np.random.default_rng(1).normal(0.0, 0.02, count).astype(np.float32)
    return drawn if kind == "float32" else (drawn.view(np.uint32) >> 16).astype(np.uint16)


def updated(before: Bits, seed: int, share: float) -> Bits:
    """Some of them one unit up or down, in the last place."""
    draw = np.random.default_rng(seed)
    bits = before.view(f"u{before.itemsize}").copy()
    changed = draw.random(len(bits)) < share
    bits[changed] += draw.integers(0, 2, np.count_nonzero(changed)).astype(bits.dtype) * 2 - 1  # wraps round
    return bits.view(before.dtype)


def applied(base: bytes | memoryview, encoded: bytes) -> bytes:
    found = bytearray(len(base))
    decode(memoryview(base), memoryview(encoded), memoryview(found))
    return bytes(found)


@pytest.mark.parametrize(("kind", "width"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 1.0])
def test_a_difference_gives_back_every_bit(kind: str, width: int, share: float) -> None:
    before = weights(50_001, kind)
    after = updated(before, 2, share)
    encoded = encode(before.data.cast("B"), after.data.cast("B"), width)
    assert applied(before.tobytes(), encoded) == after.tobytes()
    assert len(encoded) < len(after.tobytes()) * (0.01 + 0.3 * share)


def test_signs_zeros_and_infinities_are_bits_like_any_others() -> None:
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38], dtype=np.float32)
    before, after = np.tile(odd, 500), np.tile(np.roll(odd, 3), 500)
    assert applied(before.tobytes(), encode(before.data.cast("B"), after.data.cast("B"), 4)) == after.tobytes()


def test_what_has_nothing_in_common_is_not_told_as_a_difference() -> None:
    draw = random.Random(0)
    assert encode(memoryview(draw.randbytes(4096)), memoryview(draw.randbytes(4096)), 2) == b""
    assert encode(memoryview(bytes(4096)), memoryview(bytes(4095)), 2) == b""
    assert encode(memoryview(bytes(4095)), memoryview(bytes(4095)), 2) == b""


def test_a_thousand_differences_later_it_is_the_same() -> None:
    before = weights(8192, "bfloat16")
    held = before.tobytes()
    for version in range(1000):
        after = updated(before, version, 0.02)
        held = applied(held, encode(before.data.cast("B"), after.data.cast("B"), 2))
        before = after
    assert held == before.tobytes()


def test_a_damaged_difference_is_an_error_or_other_bytes_and_nothing_worse() -> None:
    before = weights(4096, "float32")
    whole = encode(before.data.cast("B"), updated(before, 3, 0.2).data.cast("B"), 4)
    draw = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        with suppress(DeltaError):
            applied(before.tobytes(), bytes(damaged[: draw.choice([len(damaged), draw.randrange(1, len(damaged))])]))


def test_the_layout_says_how_wide_elements_are() -> None:
    layout = WeightLayout.of(["half", "whole"], ["bfloat16", "float32"], [(100,), (100,)])
    version = bytearray(layout.size)
    version[: len(layout.header)] = layout.header
    widths, start = ElementWidths(memoryview(version)), len(layout.header)
    assert [widths.at(place) for place in (start, start + 396, start + 400, layout.size - 2)] == [4, 4, 2, 2]


# ------------------------------------------------------------------------------------------------------------- relays


def versions(count: int) -> list[bytes]:
    found = [weights(2 * PIECE // 2 + 5000, "bfloat16")]
    for number in range(1, count):
        found.append(updated(found[-1], number, 0.01))
    return [each.tobytes() for each in found]


def broadcast(relays: list[Node], version: int, data: bytes) -> None:
    publish(relays[0].address, Weights(version, data)).join(DEADLINE_S)
    until(lambda: all(node.holds(version, data) for node in relays), f"version {version} everywhere")


def chain(relays: list[Node], revision: int) -> None:
    for node, following in pairwise(relays):
        node.route(revision, {following.id: following.address})


def deltas(node: Node, version: int) -> int:
    buffer = node._table.get(version)
    assert buffer is not None
    return buffer.deltas


def test_relays_hand_differences_on_and_a_newcomer_begins_with_a_whole_copy(tmp_path: Path) -> None:
    data = versions(5)
    with nodes(4, tmp_path, full_every=3) as relays:
        *first, newcomer = relays
        chain(first, 1)
        for version in range(3):
            broadcast(first, version, data[version])
            for node in first:
                node.drop(version - 1)
        assert deltas(first[2], 2) == 2
        chain(relays, 2)
        until(lambda: newcomer.holds(2, data[2]), "what there is, at the newcomer")
        assert deltas(newcomer, 2) == 0
        for version in (3, 4):
            broadcast(relays, version, data[version])
        assert [deltas(first[2], version) for version in (3, 4)] == [0, 1]
        assert [deltas(newcomer, version) for version in (3, 4)] == [1, 2]
        assert all(not node.failures for node in relays)


def test_a_relay_that_is_far_behind_gets_differences_from_what_it_has(tmp_path: Path) -> None:
    data = versions(5)
    with nodes(2, tmp_path, full_every=9) as (near, far):
        chain([near, far], 1)
        broadcast([near, far], 0, data[0])
        near.drop(0)
        far.drop(1)
        far.drop(2)  # it declines those, as if it had been cut off meanwhile
        for version in (1, 2, 3):
            broadcast([near], version, data[version])
            near.drop(version - 1)
        until(lambda: far.holds(3, data[3]), "the newest version")
        assert deltas(far, 3) == 1


def test_a_difference_that_leads_to_other_bytes_is_followed_by_a_whole_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = versions(2)
    with nodes(2, tmp_path, full_every=9) as relays:
        chain(relays, 1)
        broadcast(relays, 0, data[0])

        def other(base: memoryview, encoded: memoryview, into: memoryview) -> None:
            into[:] = base

        monkeypatch.setattr(delta_transport, "decode", other)
        broadcast(relays, 1, data[1])
        assert "damaged" in relays[1].failures[0].reason


def test_whole_versions_go_where_differences_are_slower() -> None:
    rates = DeltaRates()
    assert rates.pay
    rates.measured(1 << 30, 1.0, deltas=False)
    assert rates.pay
    rates.measured(1 << 30, 2.0, deltas=True)
    assert not rates.pay
    rates.measured(1 << 30, 9.0, deltas=False)  # the network has become slower
    assert rates.pay
