"""The addresses of the page: a fixed table, in which nothing of a request ever names a file.

    /             the page                 with a token: only for who is known; others see the form
    /data         all figures, JSON        the same
    /login        the form, and where it goes (POST)
    /page.css  /charts.js  /page.js  /icon.svg

Every answer, errors too, has the same headers: the browser may load nothing from elsewhere, run no script but ours,
show the page in no frame and keep no figures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tailrace.obs import html
from tailrace.page.door import Door
from tailrace.page.follow import Newest
from tailrace.page.http import Answer, Header, Request, sentence

ASSETS = Path(__file__).parent / "assets"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
ALWAYS: tuple[Header, ...] = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
ENCRYPTED: Header = ("Strict-Transport-Security", "max-age=86400")
GUESS_S = 1.0  # what a wrong token costs
HTML, CSS, SCRIPT = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
RIGHT = "<!-- trouble -->"

Handler = Callable[[Request], Answer]


class Site:
    def __init__(self, door: Door, newest: Callable[[], Newest]) -> None:
        self._door = door
        self._newest = newest
        self._form = _asset("login.html")
        self._table: dict[str, dict[str, Handler]] = {
            "/": _read_only(self._private(_file("page.html", HTML), self._show_form)),
            "/data": _read_only(self._private(self._data, self._refuse)),
            "/login": {**_read_only(lambda _: self._form_page(200)), "POST": self._log_in},
            "/page.css": _read_only(_file("page.css", CSS)),
            "/charts.js": _read_only(_file("charts.js", SCRIPT)),
            "/page.js": _read_only(_file("page.js", SCRIPT)),
            "/icon.svg": _read_only(_file("icon.svg", "image/svg+xml")),
        }

    def respond(self, request: Request) -> Answer:
        if not self._door.knows_host(request):
            return sentence(421, "This page is only for its own machine; open it as localhost or 127.0.0.1.")
        methods = self._table.get(request.target)
        if methods is None:
            return sentence(404, "There is no such page here.")
        handler = methods.get(request.method)
        if handler is None:
            return sentence(405, "That cannot be done here.", ("Allow", ", ".join(methods)))
        return handler(request)

    def dress(self, answer: Answer) -> list[Header]:
        encrypted = [ENCRYPTED] if self._door.secure else []
        return [*ALWAYS, *encrypted, ("Content-Type", answer.kind), *answer.headers]

    # -------------------------------------------------------------------------------------------------------- handlers

    def _data(self, request: Request) -> Answer:
        newest = self._newest()
        tag = ("ETag", newest.tag)
        if newest.tag and request.header("if-none-match") == newest.tag:
            return Answer(304, headers=(tag,))
        return Answer(200, newest.content, "application/json", (tag,))

    def _private(self, handler: Handler, otherwise: Handler) -> Handler:
        """Only for who is known."""

        def guarded(request: Request) -> Answer:
            verdict = self._door.admit(request)
            if verdict == "welcome":
                return handler(request)._replace(known=self._door.has_token)
            return otherwise(request) if verdict == "unknown" else self._turn_away(verdict)

        return guarded

    def _refuse(self, request: Request) -> Answer:
        return sentence(401, "This needs the token of the page.", ("WWW-Authenticate", "Bearer"))

    def _turn_away(self, verdict: str) -> Answer:
        if verdict == "too many":
            answer = sentence(429, "Too many wrong tokens came from there; wait a little.", ("Retry-After", "10"))
        else:
            answer = sentence(401, "That is not the token of this page.", ("WWW-Authenticate", "Bearer"))
        return answer._replace(after_s=GUESS_S)

    def _show_form(self, request: Request) -> Answer:
        return self._form_page(401)._replace(headers=(("WWW-Authenticate", "Bearer"),))

    def _form_page(self, status: int, trouble: str = "") -> Answer:
        return Answer(status, self._form.replace(RIGHT, trouble).encode(), HTML)

    def _log_in(self, request: Request) -> Answer:
        if not self._door.from_here(request):
            return sentence(403, "The form was sent from another page.")
        verdict = self._door.log_in(request)
        if verdict == "welcome":
            return Answer(303, headers=(("Location", "/"), ("Set-Cookie", self._door.new_session())))
        if verdict == "too many":
            answer = self._form_page(429, "Too many wrong tokens came from there; wait a little.")
        else:
            answer = self._form_page(403, "That is not the token of this page.")
        return answer._replace(after_s=GUESS_S)


def _read_only(handler: Handler) -> dict[str, Handler]:
    return {"GET": handler, "HEAD": handler}


def _file(name: str, kind: str) -> Handler:
    """Read once, at the start."""
    answer = Answer(200, _asset(name).encode(), kind)
    return lambda _: answer


def _asset(name: str) -> str:
    """The page's own, or one that it shares with reports."""
    own = ASSETS / name
    return own.read_text(encoding="utf-8") if own.exists() else html.asset(name)
