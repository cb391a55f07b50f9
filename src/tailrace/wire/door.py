"""The door of a run that other machines may join: CURVE keys made from the run's token and the controller's secret."""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Any, NamedTuple

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from tailrace.wire.messages import WireError

SIGN_OF_LIFE_MS = 2000  # between hosts
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


class JoinKey(NamedTuple):
    """What a host needs to join a run: the token, and the key by which it knows the controller. Both are secret."""

    door: str
    token: str

    @classmethod
    def read(cls, text: str) -> JoinKey:
        """The inverse of `str`."""
        door, _, token = text.strip().partition(".")
        if not (_is_hex(door) and _is_hex(token)):
            raise WireError("this is no join key; it is in the run's folder, in join.key, as one line")
        return cls(z85.encode(bytes.fromhex(door)).decode(), token)

    def __str__(self) -> str:
        return f"{z85.decode(self.door.encode()).hex()}.{self.token}"


def _is_hex(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def public_key(secret: bytes) -> str:
    """By which the controller that has this secret is known."""
    return zmq.curve_public(z85.encode(secret)).decode()


def _client_secret(token: str) -> bytes:
    """All parts of a run have the same key; that a message is of a certain part follows from the connection."""
    return z85.encode(hashlib.sha256(b"tailrace client " + token.encode()).digest())


class Door:
    """The lock of a hub (CURVE): everything is encrypted, and only who has the run's token gets a connection."""

    def __init__(self, secret: bytes, token: str) -> None:
        self._secret = z85.encode(secret)
        self._admitted = zmq.curve_public(_client_secret(token))
        self._porter = AsyncioAuthenticator(zmq.asyncio.Context.instance())

    def lock(self, wire: zmq.Socket[Any]) -> None:
        self._porter.start()
        self._porter.configure_curve_callback(credentials_provider=self)
        wire.setsockopt(zmq.CURVE_SERVER, 1)
        wire.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        wire.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who was cut off and has connected anew is the one to talk to
        _notice_silence(wire)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this client may come in; asked by the authenticator."""
        return hmac.compare_digest(key, self._admitted)

    def close(self) -> None:
        self._porter.stop()


def bring_key(wire: zmq.Socket[bytes], door: str, token: str) -> None:
    secret = _client_secret(token)
    wire.setsockopt(zmq.CURVE_SERVERKEY, door.encode())
    wire.setsockopt(zmq.CURVE_SECRETKEY, secret)
    wire.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    _notice_silence(wire)


def _notice_silence(wire: zmq.Socket[Any]) -> None:
    """A connection between hosts may be cut without a word; then it is made anew."""
    wire.setsockopt(zmq.HEARTBEAT_IVL, SIGN_OF_LIFE_MS)
    wire.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * SIGN_OF_LIFE_MS)


def knock(endpoint: str, key: JoinKey, within_s: float) -> None:
    """Returns if the run at this address lets us in; else a `WireError` says why not."""
    wire = zmq.Context.instance().socket(zmq.DEALER)
    bring_key(wire, key.door, key.token)
    watching = wire.get_monitor_socket()
    reached, limit = False, time.monotonic() + within_s
    try:
        wire.connect(endpoint)
        while watching.poll(max(0, int((limit - time.monotonic()) * 1000))):
            event = parse_monitor_message(watching.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            reached = reached or event == zmq.EVENT_CONNECTED
            if event in REFUSALS or (reached and event == zmq.EVENT_DISCONNECTED):
                break
    finally:
        wire.disable_monitor()
        wire.close(0)
    where = endpoint.removeprefix("tcp://")
    if reached:
        raise WireError(f"{where} refused this join key; it takes the one in join.key of a run that goes on there now")
    raise WireError(f"nobody answered at {where} within {within_s:g} s; does the run go on, and is the address right?")
