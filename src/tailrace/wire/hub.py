"""The controller's end of the wire."""

from __future__ import annotations

import errno
import hmac
from collections.abc import Mapping
from typing import NamedTuple

import zmq
import zmq.asyncio

from tailrace.types import MALFORMED
from tailrace.wire.door import Door
from tailrace.wire.messages import (
    LOOPBACK,
    ORDER,
    UNNUMBERED,
    FromController,
    FromPart,
    Hello,
    Introduce,
    WireError,
    decode_from_part,
    encode,
    sign,
)

BATCH = 256  # messages that are handled, and committed, together
LONGEST_REPORT = 256 << 20  # bytes of one frame; a thousand samples streamed at once take 1 MB
LINGER_MS = 2000  # how long a closing hub tries to get its last words out


class Letter(NamedTuple):
    """A message as the hub hands it over."""

    sender: str
    number: int
    message: FromPart


class Hub:
    """The controller's end. `heard`: how far an earlier controller has written down what each part had reported.
    Without a `door` it listens on the loopback and nowhere else."""

    def __init__(
        self,
        token: str,
        port: int = 0,
        heard: Mapping[str, int] | None = None,
        door: Door | None = None,
        listen: str = LOOPBACK,
    ) -> None:
        assert door is not None or listen == LOOPBACK, "a hub for other hosts has a door"
        self._token = token
        self._door = door
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_REPORT)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        if door is not None:
            door.lock(self._socket)
        self.endpoint = self._bind(listen, port)
        self._trusted: set[bytes] = set()  # who has introduced itself to this hub
        self._asked: set[bytes] = set()  # and who was asked to; only of names that the run has given
        self._heard = {name.encode(): number for name, number in (heard or {}).items()}

    def _bind(self, listen: str, port: int) -> str:
        host = f"[{listen}]" if ":" in listen else listen
        self._socket.setsockopt(zmq.IPV6, ":" in listen)
        try:
            bound = self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            if error.errno == errno.EADDRNOTAVAIL or error.errno == errno.ENODEV:
                raise WireError(f"local.listen {listen} is not an address of this host; write one that is") from None
            raise WireError(
                f"local.port {port} cannot be used ({error.strerror}); write another one, or 0 for any"
            ) from None
        return bound.addr

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    async def receive(self) -> list[Letter]:
        """What parts of ours have sent: waits for the first message, takes what has arrived with it."""
        letters: list[Letter] = []
        while not letters:
            await self._hear(letters)
        while len(letters) < BATCH and await self._socket.poll(0):
            await self._hear(letters)
        return letters

    async def _hear(self, letters: list[Letter]) -> None:
        frames = await self._socket.recv_multipart()
        try:
            sender, label, signature, content = frames
            if not hmac.compare_digest(signature, sign(self._token, sender, label, content)):
                return
            number, message = int.from_bytes(label, "big"), decode_from_part(content)
        except (ValueError, *MALFORMED):
            return  # not one of ours: ours are only ever encoded from these types
        if isinstance(message, Hello):
            self._trusted.add(sender)
            self._asked.discard(sender)
        if sender not in self._trusted or number > self._heard.get(sender, 0) + 1:
            await self._ask(sender)
        elif number == UNNUMBERED or number > self._heard.get(sender, 0):
            self._heard[sender] = max(number, self._heard.get(sender, 0))
            letters.append(Letter(sender.decode(), number, message))

    async def _ask(self, sender: bytes) -> None:
        """It knew an earlier controller, or something of it was lost on the way: it has to begin anew."""
        self._trusted.discard(sender)
        if sender not in self._asked:
            self._asked.add(sender)
            await self.send(sender.decode(), Introduce(self._heard.get(sender, 0)))

    async def send(self, name: str, message: FromController) -> None:
        """Hand a message over; one for a part that is gone is dropped."""
        receiver, content = name.encode(), encode(message)
        await self._socket.send_multipart([receiver, sign(self._token, receiver, ORDER, content), content])

    def close(self) -> None:
        self._socket.close(LINGER_MS)
        if self._door is not None:
            self._door.close()
