"""NIXL between relays: when it is used, what becomes of a hop on which it fails, and what is refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from relays import Node, Weights, both_ways, nixl_agent, publish, take_way, until
from tailrace.weights import nixl_transport
from tailrace.weights.channel import ChannelError
from tailrace.weights.checksum import PIECE
from tailrace.weights.nixl_transport import WORTH, FasterWay, NixlAgent, NixlTransport, NixlUnavailableError, devices_of

DATA = [os.urandom(8 * PIECE + 1000) for _ in range(3)]
installed = pytest.mark.parametrize("way", both_ways()[1:])


def test_both_ways_are_measured_and_the_faster_one_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    way = FasterWay()
    for sender, rate in (("fast", 3e9), ("slow", 1e9)):
        assert not way(sender, WORTH), "the first version comes over the socket"
        way.measured(sender, by_nixl=False, rate=2e9)
        assert way(sender, WORTH), "the second by NIXL"
        way.measured(sender, by_nixl=True, rate=rate)
    assert (way("fast", WORTH), way("slow", WORTH), way("fast", WORTH - 1)) == (True, False, False)
    assert [record.message for record in caplog.records] == [
        "weights from fast come by NIXL: 3,000 MB/s by NIXL, 2,000 MB/s over TCP",
        "weights from slow come over TCP: 1,000 MB/s by NIXL, 2,000 MB/s over TCP",
    ]


def test_a_sender_with_whom_it_failed_is_not_asked_for_it_again(caplog: pytest.LogCaptureFixture) -> None:
    way = FasterWay()
    way.measured("sender", by_nixl=False, rate=1e9)
    for _ in range(2):
        way.failed("sender", ChannelError("cut"))
    assert not way("sender", WORTH)
    assert [record.message for record in caplog.records] == [
        "weights from sender come over TCP from now on, because NIXL failed: cut"
    ]


def test_the_devices_of_an_interface_are_those_of_rdma_first(tmp_path: Path) -> None:
    (tmp_path / "eth0").mkdir()
    (tmp_path / "ib0" / "device" / "infiniband" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "ib0" / "dev_port").write_text("0\n")
    assert devices_of("eth0", tmp_path) == ["eth0"]
    assert devices_of("ib0", tmp_path) == ["mlx5_0:1", "ib0"]


def test_where_it_cannot_be_used_the_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NixlUnavailableError, match=r'relay\.interface is "nothere0", where this machine has no address'
    ):
        NixlAgent("nothere0")
    monkeypatch.setattr(nixl_transport, "FLAVOURS", ("nixl_of_nobody",))
    with pytest.raises(NixlUnavailableError, match="NIXL is not installed in this Python"):
        NixlAgent("lo")


@installed
def test_a_hop_measures_both_ways_with_real_versions(tmp_path: Path, way: str, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    take_way(way, monkeypatch)
    monkeypatch.setattr(nixl_transport, "WORTH", PIECE)
    monkeypatch.setattr(nixl_transport.LentChunks, "chunk", PIECE)
    first, second = Node(0, tmp_path), Node(1, tmp_path)
    second._nixl = NixlTransport(nixl_agent(1), FasterWay())
    first.route(1, {1: second.address})
    try:
        for version, data in enumerate(DATA):
            send(first, Weights(version, data))
            until(lambda version=version, data=data: second.holds(version, data), f"version {version}")
    finally:
        first.close()
        second.close()
    hop = f"weights from 127.0.0.1 ({nixl_agent(0).name}) come "
    assert len([record for record in caplog.records if record.message.startswith(hop)]) == 1


@installed
def test_a_hop_on_which_it_fails_goes_on_over_tcp(tmp_path: Path, way: str, monkeypatch, caplog) -> None:
    take_way(way, monkeypatch)
    reads = 0

    def read(self: NixlAgent, *arguments) -> None:
        nonlocal reads
        reads += 1
        if reads > 1:
            raise RuntimeError("the link is cut")
        original(self, *arguments)

    first, second = Node(0, tmp_path), Node(1, tmp_path)
    send(first, Weights(1, DATA[0]))
    original = NixlAgent.read
    monkeypatch.setattr(NixlAgent, "read", read)
    monkeypatch.setattr(nixl_transport.LentChunks, "chunk", PIECE)
    try:
        first.route(1, {1: second.address})
        until(lambda: second.holds(1, DATA[0]), "the rest of the version")
        until(lambda: len(first.failures) == 1, "what the sender saw of it")
    finally:
        first.close()
        second.close()
    assert reads == 2, "the first piece came by NIXL and stays, the others did not"
    assert [failure.target for failure in second.failures] == [None]
    assert "could not read from" in second.failures[0].reason
    assert "over TCP from now on, because NIXL failed: the link is cut" in caplog.text


def send(node: Node, weights: Weights) -> None:
    publish(node.address, weights).join(20.0)
