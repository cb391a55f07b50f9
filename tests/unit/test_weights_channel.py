"""Who may talk to a relay: greetings that are forged, repeated, altered or meant for somebody else, and TLS."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from relays import DEADLINE_S, TOKEN, Node, Weights, nodes, until
from tailrace.weights import channel as channel_module
from tailrace.weights import relay_node
from tailrace.weights.channel import MAGIC, Address, Channel, ChannelError, TokenError, connect, dial
from tailrace.weights.checksum import PIECE
from tailrace.weights.messages import OfferVersion, VersionRefused, VersionSealed
from tailrace.weights.transfer import offer
from tailrace.wire.tls import ListenError, own_address

DATA = os.urandom(PIECE + 1000)
Alter = Callable[[bytes], bytes]


@contextmanager
def eavesdropper(target: Address, alter: Alter = bytes) -> Iterator[tuple[Address, list[bytes]]]:
    """Somebody on the way, who keeps what callers say and may alter it."""
    heard: list[bytes] = []

    def pump(source: socket.socket, sink: socket.socket, change: Alter, note: list[bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                note.append(data)
                sink.sendall(change(data))
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                callee = socket.create_connection((target.host, target.port))
                Thread(target=pump, args=(caller, callee, alter, heard), daemon=True).start()
                Thread(target=pump, args=(callee, caller, bytes, []), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=accept, daemon=True).start()
        yield Address(*listener.getsockname()[:2])._replace(fingerprint=target.fingerprint), heard


def send(address: Address, token: bytes = TOKEN) -> object:
    with dial(address, token, stall_s=DEADLINE_S) as channel:
        return offer(channel, Weights(1, DATA))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all relays and callers were on hosts of their own."""
    monkeypatch.setattr(relay_node, "is_loopback", lambda host: False)
    monkeypatch.setattr(Channel, "is_local", lambda channel: False)


def test_what_was_recorded_is_worthless(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (relay,):
        with eavesdropper(relay.address) as (address, heard):
            assert isinstance(send(address), VersionSealed)
        relay.drop(1)
        with socket.create_connection((relay.address.host, relay.address.port)) as again:
            again.settimeout(DEADLINE_S)
            with suppress(OSError):
                again.sendall(b"".join(heard))
                while again.recv(1 << 16):
                    pass
        assert (relay.stored, relay.versions()) == ([1], ())
        assert TOKEN not in b"".join(heard)


def test_a_message_that_was_altered_is_refused(tmp_path: Path) -> None:
    def enlarge(data: bytes) -> bytes:
        return data.replace(b"Offer", b"offer")

    with nodes(1, tmp_path) as (relay,), eavesdropper(relay.address, enlarge) as (address, _):
        with pytest.raises(ChannelError):
            send(address)
        assert relay.stored == []


def test_a_message_cannot_be_sent_back_or_twice(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (relay,), connect(relay.address, DEADLINE_S) as channel:
        channel.call(TOKEN)
        channel.send(OfferVersion(1, 10))
        channel._sent -= 1  # the same number again
        channel.send(OfferVersion(1, 10))
        assert not isinstance(channel.receive("an answer to the first"), VersionSealed)
        with pytest.raises(ChannelError):
            channel.receive("an answer to the second")


def test_between_hosts_nothing_is_readable_and_the_version_arrives(tmp_path: Path, elsewhere: None) -> None:
    with nodes(2, tmp_path) as (relay, following):
        assert len(relay.address.fingerprint) == 64
        assert Address.read(str(relay.address)) == relay.address
        relay.route(1, {1: following.address})
        with eavesdropper(relay.address) as (address, heard):
            assert isinstance(send(address), VersionSealed)
        assert MAGIC not in b"".join(heard)
        assert DATA[:100] not in b"".join(heard)
        until(lambda: following.holds(1, DATA), "the version at the end of the chain")


def test_somebody_else_s_certificate_is_refused_before_anything_is_said(tmp_path: Path, elsewhere: None) -> None:
    """A relay of the same run, even: the address says whom one wants to talk to."""
    with nodes(2, tmp_path) as (relay, other):
        with pytest.raises(TokenError, match="its certificate is another one"):
            send(other.address._replace(fingerprint=relay.address.fingerprint))
        assert other.stored == []


def test_between_hosts_a_wrong_token_and_a_caller_without_encryption_are_refused(
    tmp_path: Path, elsewhere: None
) -> None:
    with nodes(1, tmp_path) as (relay,):
        with pytest.raises(TokenError):
            send(relay.address, b"x" * 32)
        with pytest.raises(ChannelError, match=r"closed the connection|Connection reset"):
            send(relay.address._replace(fingerprint=""))
        assert relay.stored == []


def test_strangers_are_few_and_shown_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_node, "MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.5)
    with nodes(1, tmp_path) as (relay,):
        place = (relay.address.host, relay.address.port)
        crowd = [socket.create_connection(place) for _ in range(8)]
        until(lambda: len(relay._connections) == 3, "three of them to be let in")
        dripping = time.monotonic()
        while relay._connections:  # a byte now and then does not help
            assert time.monotonic() < dripping + DEADLINE_S
            for stranger in crowd:
                with suppress(OSError):
                    stranger.send(b"t")
            time.sleep(0.05)
        assert isinstance(send(relay.address), VersionSealed)
        for stranger in crowd:
            stranger.close()


def test_a_crowd_of_strangers_keeps_nobody_out(tmp_path: Path) -> None:
    """Each has ten seconds; whoever comes later takes the place of the one that has been silent longest."""
    with nodes(1, tmp_path) as (relay,):
        crowd = [socket.create_connection((relay.address.host, relay.address.port)) for _ in range(300)]
        assert isinstance(send(relay.address), VersionSealed)
        until(lambda: len(relay._connections) <= relay_node.MAX_UNAUTHENTICATED, "the others to be gone")
        for stranger in crowd:
            stranger.close()


def test_a_message_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (relay,), socket.create_connection((relay.address.host, relay.address.port)) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.sendall(MAGIC + bytes(32) + b"\xff" * 4 + bytes(32))
        stranger.recv(len(MAGIC) + 32)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_version_that_is_nothing_or_beyond_all_memory_is_refused(tmp_path: Path) -> None:
    relay = Node(0, tmp_path, quota=10_000_000)
    for size in (0, -5, 10_000_001, 1 << 59, 1 << 62):
        with dial(relay.address, TOKEN, stall_s=DEADLINE_S) as channel:
            channel.send(OfferVersion(1, size))
            with suppress(ChannelError):  # what cannot be is not even answered
                assert isinstance(channel.receive("an answer"), VersionRefused)
    assert relay.memory.held_bytes() == 0
    relay.close()


def test_a_network_in_which_this_host_is_not_is_named() -> None:
    assert own_address("127.0.0.1") == own_address("127.0.0.0/8") == "127.0.0.1"
    with pytest.raises(ListenError, match=r"203\.0\.113\.0/24; write an address of it|way into"):
        own_address("203.0.113.0/24")
