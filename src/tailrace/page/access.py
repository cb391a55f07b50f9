"""Who may see the page.

On the loopback: whoever names this machine as it names itself, so that no foreign name can be made to point here. With
a token: who sends it as `Authorization: Bearer`, or has typed it into the form and got a cookie for it. Off the
loopback there is always a token, and TLS. Tokens and cookies are compared in constant time, by their digests.

Whoever has the right token is let in, whatever others have guessed before: they may have the same address, as all
accounts of a machine have on its loopback. So guessing is not made impossible but useless: a token has 16 characters or
more, and each wrong one costs a second and a connection (`site`), also those beyond the few that an address has.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import parse_qs

from tailrace.errors import TailraceError
from tailrace.page.http import PageRequest

VARIABLE = "TAILRACE_PAGE_TOKEN"
MIN_TOKEN, MAX_TOKEN = 16, 512  # characters of a token
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
SESSIONS, SESSION_S = 64, 12 * 3600.0
ATTEMPTS = 5  # at once; then one more every ATTEMPT_REFILL_S
ATTEMPT_REFILL_S = 10.0
TRACKED_CLIENTS = 1024  # addresses that are remembered

Verdict = Literal["accepted", "missing", "wrong", "limited"]


class PageError(TailraceError):
    """Why the page cannot be opened there, for the person who typed."""


class ListenAddress(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> ListenAddress:
    """`127.0.0.1:8080`, `[::1]:0`, `localhost:8080`."""
    host, _, port = text.rpartition(":")
    host = {"localhost": "127.0.0.1"}.get(host, host)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        ipaddress.ip_address(host)
        number = int(port) if port.isascii() and port.isdecimal() else -1
    except ValueError:
        number = -1
    if not 0 <= number < 65536:
        raise PageError(f"--listen is '{text[:80]}'; write ADDRESS:PORT, as 127.0.0.1:8080 or [::1]:0")
    return ListenAddress(host, number)


def find_token(address: ListenAddress, file: Path | None) -> str | None:
    """From the file or the environment; off the loopback there has to be one."""
    text = os.environ.pop(VARIABLE, None)
    source = VARIABLE
    if file is not None:
        text, source = _content(file), str(file)
    if text is None:
        if address.loopback:
            return None
        raise PageError(
            f"on {address.host} others can come, so a token is needed; write one of {MIN_TOKEN} characters or more "
            f"into a file and name it with --token-file, or set {VARIABLE}"
        )
    return _checked(text.strip(), source)


def _content(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(16 * MAX_TOKEN).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise PageError(f"the token file {file} cannot be read ({why}); it has one line, the token") from None


def _checked(token: str, source: str) -> str:
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise PageError(
            f"the token of {source} has {len(token)} characters; write {MIN_TOKEN} to {MAX_TOKEN}, "
            "as `openssl rand -hex 24` gives them"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise PageError(f"the token of {source} has spaces or special characters; write letters and digits")
    return token


class AccessControl:
    """For an address whose port is known."""

    def __init__(self, address: ListenAddress, token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        assert address.loopback or token, "others can come"
        self.secure = not address.loopback  # TLS
        # All ports of a host share their cookies, so that ours has to say which it is of.
        self.cookie = f"{'__Host-' if self.secure else ''}tailrace-{address.port}"
        self._names = {*LOOPBACK_NAMES, _split(str(address))[0]} if address.loopback else None  # None: any
        self._token = None if token is None else _digest(token)
        self._clock = clock
        self._sessions: OrderedDict[bytes, float] = OrderedDict()  # digest: until when
        self._attempts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: guesses left, and when

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def host_allowed(self, request: PageRequest) -> bool:
        """On the loopback: the name by which we were called is one of ours."""
        name, port = _split(request.header("host"))
        return self._names is None or (name in self._names and (not port or port.isdecimal()))

    def same_origin(self, request: PageRequest) -> bool:
        """A form comes from our own page, as far as the browser says. Because the page sends no referrer, its origin is
        `null` then."""
        own = f"{'https' if self.secure else 'http'}://{request.header('host')}"
        site = request.header("sec-fetch-site")
        return site in ("same-origin", "none") if site else request.header("origin") in ("", "null", own)

    # -------------------------------------------------------------------------------------------------------- deciding

    def authenticate(self, request: PageRequest) -> Verdict:
        if self._token is None or self._has_session(request):
            return "accepted"
        scheme, _, token = request.header("authorization").partition(" ")
        if scheme.lower() != "bearer":
            return "missing"
        return self._verify(token.strip(), request.client)

    def log_in(self, request: PageRequest) -> Verdict:
        """What was typed into the form."""
        try:
            fields = parse_qs(request.body.decode("ascii"), max_num_fields=4)
        except ValueError:
            fields = {}
        return self._verify(fields.get("token", [""])[0].strip(), request.client)

    def new_session(self) -> str:
        """The value of a `Set-Cookie` header."""
        session = secrets.token_urlsafe(32)
        while len(self._sessions) >= SESSIONS:
            self._sessions.popitem(last=False)
        self._sessions[_digest(session)] = self._clock() + SESSION_S
        secure = "; Secure" if self.secure else ""
        return f"{self.cookie}={session}; Path=/; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict{secure}"

    def _has_session(self, request: PageRequest) -> bool:
        pairs = [pair.strip().partition("=") for pair in request.header("cookie").split(";")]
        shown = [value for name, _, value in pairs if name == self.cookie]
        return any(self._sessions.get(_digest(each), 0.0) > self._clock() for each in shown[:4])

    def _verify(self, token: str, client: str) -> Verdict:
        if self._token is None or hmac.compare_digest(_digest(token), self._token):
            return "accepted"
        return "wrong" if self._take_attempt(_network(client)) else "limited"

    def _take_attempt(self, who: str) -> bool:
        """Whether an address had one left."""
        left = self._attempts_left(who)
        if left < 1:
            return False
        self._attempts[who] = (left - 1, self._clock())
        self._attempts.move_to_end(who)
        while len(self._attempts) > TRACKED_CLIENTS:
            self._attempts.popitem(last=False)
        return True

    def _attempts_left(self, who: str) -> float:
        left, since = self._attempts.get(who, (float(ATTEMPTS), 0.0))
        return min(float(ATTEMPTS), left + (self._clock() - since) / ATTEMPT_REFILL_S)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _split(host: str) -> tuple[str, str]:
    """Name and port of a Host header."""
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        return f"{name}{bracket}".lower(), rest.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower(), port


def _network(client: str) -> str:
    """Who counts as one: an IPv4 address, or the network that an IPv6 host usually has to itself."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return ""
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
