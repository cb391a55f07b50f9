"""`tailrace page`: follows a run and serves its page, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from contextlib import suppress
from pathlib import Path

from tailrace.page.door import Door, Place, find_token, parse_place
from tailrace.page.follow import Follower
from tailrace.page.server import Server, open_socket
from tailrace.page.site import Site

DEFAULT = "127.0.0.1:0"


def serve(run: Path, listen: str, token_file: Path | None) -> int:
    """Until it is told to end. What is wrong is refused before anything is opened."""
    place = parse_place(listen)
    token = find_token(place, token_file)
    follower = Follower(run)
    tls, fingerprint = (None, "") if place.loopback else _identity()
    listening = open_socket(place)
    place = Place(place.host, listening.getsockname()[1])
    site = Site(Door(place, token), lambda: follower.newest)
    follower.start()
    try:
        asyncio.run(_serve(Server(site, listening, tls), _greeting(place, fingerprint)))
    finally:
        follower.stop()
    return 0


async def _serve(server: Server, greeting: str) -> None:
    task = asyncio.create_task(server.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    print(greeting, flush=True)
    with suppress(asyncio.CancelledError):
        await task


def _greeting(place: Place, fingerprint: str) -> str:
    if not fingerprint:
        return f"the page is at http://{place}/ (Ctrl-C ends it; the run does not mind)"
    wildcard = place.host in ("0.0.0.0", "::")
    shown = f"{socket.gethostname()}:{place.port}" if wildcard else str(place)
    return (
        f"the page is at https://{shown}/ (Ctrl-C ends it; the run does not mind)\n"
        f"its certificate vouches for itself; SHA-256 fingerprint {fingerprint}"
    )


def _identity() -> tuple[ssl.SSLContext, str]:
    """Made anew at every start, as relays do; the fingerprint is written as browsers show it."""
    from tailrace.wire.tls import Identity

    identity = Identity()
    digits = identity.fingerprint.upper()
    return identity.context, ":".join(digits[place : place + 2] for place in range(0, len(digits), 2))
