"""`tailrace page`: follows runs and serves their page, until Ctrl-C."""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from tailrace.logs import output
from tailrace.page.access import AccessControl, ListenAddress, find_token, parse_listen
from tailrace.page.answers import RunAnswers
from tailrace.page.app import PageApp
from tailrace.page.http import AsgiApplication
from tailrace.page.indexers import Indexers
from tailrace.page.runs import RunLibrary
from tailrace.page.server import PageListener, PageServer

DEFAULT = "127.0.0.1:0"
NICE = 10  # a run on the same machine goes first
SWITCH_S = 0.0005  # between threads: who reads a long history lets those go first who answer


def serve(runs: Sequence[Path], listen: str, token_file: Path | None) -> int:
    """Until it is told to end. What is wrong is refused before anything is opened."""
    address = parse_listen(listen)
    token = find_token(address, token_file)
    library = RunLibrary(runs)
    library.follower(0)
    tls, fingerprint = (None, "") if address.loopback else _identity()
    listener = PageListener(address)
    address = ListenAddress(address.host, listener.getsockname()[1])
    answers = RunAnswers(library)
    app = PageApp(AccessControl(address, token), answers.table, answers.stamp)
    greeting = _greeting(address, fingerprint)
    sys.setswitchinterval(SWITCH_S)
    os.nice(NICE)
    indexers = Indexers(library)
    library.warm_up()
    try:
        asgi = AsgiApplication(app.respond, app.headers)
        PageServer(asgi, listener, tls, ready=lambda: output(greeting)).run([listener])
    finally:
        indexers.stop()
        library.stop()
    return 0


def _greeting(address: ListenAddress, fingerprint: str) -> str:
    if not fingerprint:
        return f"the page is at http://{address}/ (Ctrl-C ends it; the run does not mind)"
    wildcard = address.host in ("0.0.0.0", "::")
    shown = f"{socket.gethostname()}:{address.port}" if wildcard else str(address)
    return (
        f"the page is at https://{shown}/ (Ctrl-C ends it; the run does not mind)\n"
        f"its certificate vouches for itself; SHA-256 fingerprint {fingerprint}"
    )


def _identity() -> tuple[ssl.SSLContext, str]:
    """Made anew at every start, as relays do; the fingerprint is written as browsers show it."""
    from tailrace.wire.tls import Identity

    identity = Identity()
    digits = identity.fingerprint.upper()
    return identity.context, ":".join(digits[start : start + 2] for start in range(0, len(digits), 2))
