"""The addresses of the page: a fixed table, in which nothing of a request ever names a file.

    /             the page                 with a token: authenticated clients only; others see the form
    /data ...     JSON (see `answers`)     the same; these alone take a query
    /metrics      for Prometheus           the same
    /login        the form, and where it goes (POST)
    /page.css  /icon.svg  and the scripts

Every answer, errors too, has the same headers: the browser may load nothing from elsewhere, run no script but ours,
show the page in no frame and keep no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.obs import html
from tailrace.page.access import AccessControl
from tailrace.page.answers import Answer, BadQueryError, Query, parse_query
from tailrace.page.follow import PageContent
from tailrace.page.http import Header, PageRequest, PageResponse, text_response
from tailrace.page.prometheus import CONTENT_TYPE, exposition
from tailrace.page.shared_answers import SharedAnswers, Stamp

ASSETS = Path(__file__).parent / "assets"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS: tuple[Header, ...] = (
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
HSTS: Header = ("Strict-Transport-Security", "max-age=86400")
WRONG_TOKEN_DELAY_S = 1.0  # what a wrong token costs
SCRIPTS = ("charts.js", "load.js", "curves.js", "overview.js", "evaluations.js", "tokens.js", "samples.js")
SCRIPTS += ("prompts.js", "metrics.js", "timeline.js", "settings.js", "runs.js", "page.js")  # in this order
HTML, CSS, SCRIPT = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
FORM_ERROR = "<!-- trouble -->"
TOO_MANY = "Too many wrong tokens came from there; wait a little."
WRONG_TOKEN = "That is not the token of this page."

Handler = Callable[[PageRequest], PageResponse]
StampOf = Callable[[str, Query], Stamp]


class PageApp:
    def __init__(
        self, access: AccessControl, answers: Mapping[str, Answer], stamp: StampOf = lambda address, query: None
    ) -> None:
        """`stamp`: of the files that an answer follows from."""
        self._access = access
        self._answers = answers
        self._stamp = stamp
        self._shared = SharedAnswers()
        self._form = _asset("login.html")
        self._table: dict[str, dict[str, Handler]] = {
            "/": _read_only(self._private(_file("page.html", HTML), self._show_form)),
            "/metrics": _read_only(self._private(self._metrics, self._refuse)),
            "/login": {**_read_only(lambda _: self._form_page(200)), "POST": self._log_in},
            "/page.css": _read_only(_file("page.css", CSS)),
            "/work.css": _read_only(_file("work.css", CSS)),
            "/icon.svg": _read_only(_file("icon.svg", "image/svg+xml")),
        }
        self._table |= {f"/{name}": _read_only(_file(name, SCRIPT)) for name in SCRIPTS}
        self._table |= {address: _read_only(self._private(self._data, self._refuse)) for address in answers}

    def respond(self, request: PageRequest) -> PageResponse:
        if not self._access.host_allowed(request):
            return text_response(421, "This page is only for its own machine; open it as localhost or 127.0.0.1.")
        address, query, _ = request.target.partition("?")
        methods = self._table.get(address) if not query or address in self._answers else None
        if methods is None:
            return text_response(404, "There is no such page here.")
        handler = methods.get(request.method)
        if handler is None:
            return text_response(405, "That cannot be done here.", ("Allow", ", ".join(methods)))
        return handler(request)

    def headers(self, response: PageResponse) -> list[Header]:
        encrypted = [HSTS] if self._access.secure else []
        return [*SECURITY_HEADERS, *encrypted, ("Content-Type", response.content_type), *response.headers]

    # -------------------------------------------------------------------------------------------------------- handlers

    def _data(self, request: PageRequest) -> PageResponse:
        """Unless somebody has just asked for the same, worked out elsewhere: it may read much."""
        found = self._shared.fresh(request.target)
        return PageResponse(200, work=lambda: self._answer(request)) if found is None else _tagged(request, found)

    def _answer(self, request: PageRequest) -> PageResponse:
        address, _, text = request.target.partition("?")
        try:
            query = parse_query(text)
            stamp, work = partial(self._stamp, address, query.copy()), partial(self._answers[address], query)
            found = self._shared.get(request.target, stamp, work)
        except BadQueryError as error:
            return text_response(400, str(error))
        except TailraceError as error:
            return text_response(409, str(error))
        return _tagged(request, found)

    def _metrics(self, request: PageRequest) -> PageResponse:
        figures = self._answers["/data"]
        return PageResponse(200, work=lambda: PageResponse(200, exposition(figures({}).content), CONTENT_TYPE))

    def _private(self, handler: Handler, otherwise: Handler) -> Handler:
        """For authenticated clients only."""

        def guarded(request: PageRequest) -> PageResponse:
            verdict = self._access.authenticate(request)
            if verdict == "accepted":
                return handler(request)._replace(authenticated=self._access.has_token)
            return otherwise(request) if verdict == "missing" else self._reject(verdict)

        return guarded

    def _refuse(self, request: PageRequest) -> PageResponse:
        return text_response(401, "This needs the token of the page.", ("WWW-Authenticate", "Bearer"))

    def _reject(self, verdict: str) -> PageResponse:
        if verdict == "limited":
            response = text_response(
                429, "Too many wrong tokens came from there; wait a little.", ("Retry-After", "10")
            )
        else:
            response = text_response(401, WRONG_TOKEN, ("WWW-Authenticate", "Bearer"))
        return response._replace(delay_s=WRONG_TOKEN_DELAY_S)

    def _show_form(self, request: PageRequest) -> PageResponse:
        return self._form_page(401)._replace(headers=(("WWW-Authenticate", "Bearer"),))

    def _form_page(self, status: int, trouble: str = "") -> PageResponse:
        return PageResponse(status, self._form.replace(FORM_ERROR, trouble).encode(), HTML)

    def _log_in(self, request: PageRequest) -> PageResponse:
        if not self._access.same_origin(request):
            return text_response(403, "The form was sent from another page.")
        verdict = self._access.log_in(request)
        if verdict == "accepted":
            return PageResponse(303, headers=(("Location", "/"), ("Set-Cookie", self._access.new_session())))
        response = self._form_page(429, TOO_MANY) if verdict == "limited" else self._form_page(403, WRONG_TOKEN)
        return response._replace(delay_s=WRONG_TOKEN_DELAY_S)


def _tagged(request: PageRequest, found: PageContent) -> PageResponse:
    """Without its content, if the client has that."""
    tag = ("ETag", found.tag)
    if found.tag and request.header("if-none-match") == found.tag:
        return PageResponse(304, headers=(tag,))
    return PageResponse(200, found.content, "application/json", (tag,))


def _read_only(handler: Handler) -> dict[str, Handler]:
    return {"GET": handler, "HEAD": handler}


def _file(name: str, content_type: str) -> Handler:
    """Read once, at the start."""
    response = PageResponse(200, _asset(name).encode(), content_type)
    return lambda _: response


def _asset(name: str) -> str:
    """The page's own, or one that it shares with reports."""
    own = ASSETS / name
    return own.read_text(encoding="utf-8") if own.exists() else html.asset(name)
