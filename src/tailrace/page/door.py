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
from tailrace.page.http import Request

VARIABLE = "TAILRACE_PAGE_TOKEN"
SHORTEST, LONGEST = 16, 512  # characters of a token
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
SESSIONS, SESSION_S = 64, 12 * 3600.0
GUESSES = 5  # at once; then one more every REGAIN_S
REGAIN_S = 10.0
GUESSERS = 1024  # addresses that are remembered

Verdict = Literal["welcome", "unknown", "wrong", "too many"]


class DoorError(TailraceError):
    """Why the page cannot be opened there, for the person who typed."""


class Place(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_place(text: str) -> Place:
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
        raise DoorError(f"--listen is '{text[:80]}'; write ADDRESS:PORT, as 127.0.0.1:8080 or [::1]:0")
    return Place(host, number)


def find_token(place: Place, file: Path | None) -> str | None:
    """From the file or the environment; off the loopback there has to be one."""
    text = os.environ.pop(VARIABLE, None)
    source = VARIABLE
    if file is not None:
        text, source = _content(file), str(file)
    if text is None:
        if place.loopback:
            return None
        raise DoorError(
            f"on {place.host} others can come, so a token is needed; write one of {SHORTEST} characters or more into a "
            f"file and name it with --token-file, or set {VARIABLE}"
        )
    return _checked(text.strip(), source)


def _content(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(16 * LONGEST).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise DoorError(f"the token file {file} cannot be read ({why}); it has one line, the token") from None


def _checked(token: str, source: str) -> str:
    if not SHORTEST <= len(token) <= LONGEST:
        raise DoorError(
            f"the token of {source} has {len(token)} characters; write {SHORTEST} to {LONGEST}, "
            "as `openssl rand -hex 24` gives them"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise DoorError(f"the token of {source} has spaces or special characters; write letters and digits")
    return token


class Door:
    """At a place whose port is known."""

    def __init__(self, place: Place, token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        assert place.loopback or token, "others can come"
        self.secure = not place.loopback  # TLS
        # All ports of a host share their cookies, so that ours has to say which it is of.
        self.cookie = f"{'__Host-' if self.secure else ''}tailrace-{place.port}"
        self._names = {*OWN_NAMES, _split(str(place))[0]} if place.loopback else None  # None: any
        self._token = None if token is None else _digest(token)
        self._clock = clock
        self._sessions: OrderedDict[bytes, float] = OrderedDict()  # digest: until when
        self._guesses: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: guesses left, and when

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def knows_host(self, request: Request) -> bool:
        """On the loopback: the name by which we were called is one of ours."""
        name, port = _split(request.header("host"))
        return self._names is None or (name in self._names and (not port or port.isdecimal()))

    def from_here(self, request: Request) -> bool:
        """A form comes from our own page, as far as the browser says. Because the page sends no referrer, its origin is
        `null` then."""
        own = f"{'https' if self.secure else 'http'}://{request.header('host')}"
        site = request.header("sec-fetch-site")
        return site in ("same-origin", "none") if site else request.header("origin") in ("", "null", own)

    # -------------------------------------------------------------------------------------------------------- deciding

    def admit(self, request: Request) -> Verdict:
        if self._token is None or self._has_session(request):
            return "welcome"
        scheme, _, token = request.header("authorization").partition(" ")
        if scheme.lower() != "bearer":
            return "unknown"
        return self._try(token.strip(), request.visitor)

    def log_in(self, request: Request) -> Verdict:
        """What was typed into the form."""
        try:
            fields = parse_qs(request.body.decode("ascii"), max_num_fields=4)
        except ValueError:
            fields = {}
        return self._try(fields.get("token", [""])[0].strip(), request.visitor)

    def new_session(self) -> str:
        """The value of a `Set-Cookie` header."""
        session = secrets.token_urlsafe(32)
        while len(self._sessions) >= SESSIONS:
            self._sessions.popitem(last=False)
        self._sessions[_digest(session)] = self._clock() + SESSION_S
        secure = "; Secure" if self.secure else ""
        return f"{self.cookie}={session}; Path=/; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict{secure}"

    def _has_session(self, request: Request) -> bool:
        pairs = [pair.strip().partition("=") for pair in request.header("cookie").split(";")]
        shown = [value for name, _, value in pairs if name == self.cookie]
        return any(self._sessions.get(_digest(each), 0.0) > self._clock() for each in shown[:4])

    def _try(self, token: str, visitor: str) -> Verdict:
        if self._token is None or hmac.compare_digest(_digest(token), self._token):
            return "welcome"
        return "wrong" if self._spend_guess(_network(visitor)) else "too many"

    def _spend_guess(self, who: str) -> bool:
        """Whether an address had one left."""
        left = self._guesses_left(who)
        if left < 1:
            return False
        self._guesses[who] = (left - 1, self._clock())
        self._guesses.move_to_end(who)
        while len(self._guesses) > GUESSERS:
            self._guesses.popitem(last=False)
        return True

    def _guesses_left(self, who: str) -> float:
        left, since = self._guesses.get(who, (float(GUESSES), 0.0))
        return min(float(GUESSES), left + (self._clock() - since) / REGAIN_S)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _split(host: str) -> tuple[str, str]:
    """Name and port of a Host header."""
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        return f"{name}{bracket}".lower(), rest.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower(), port


def _network(visitor: str) -> str:
    """Who counts as one: an IPv4 address, or the network that an IPv6 host usually has to itself."""
    try:
        address = ipaddress.ip_address(visitor.partition("%")[0])
    except ValueError:
        return ""
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
