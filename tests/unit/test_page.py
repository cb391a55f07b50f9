"""The page of a run: who gets in, what every answer carries, what a slow or hostile client can do, what is shown."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tailrace.cli import main
from tailrace.config import Config, load
from tailrace.obs.activity import COUNTED, Lane
from tailrace.obs.charts import POINTS, SPANS, Curve, lane_view
from tailrace.obs.html import asset
from tailrace.obs.trained_steps import Staleness, StepRecord
from tailrace.page.access import (
    ATTEMPTS,
    TRACKED_CLIENTS,
    AccessControl,
    ListenAddress,
    PageError,
    find_token,
    parse_listen,
)
from tailrace.page.app import SECURITY_HEADERS, WRONG_TOKEN_DELAY_S, PageApp
from tailrace.page.follow import Follower, PageContent
from tailrace.page.http import MAX_BODY, MAX_HEAD, AsgiApplication, PageRequest
from tailrace.page.server import Limits, PageListener, PageServer
from tailrace.protocol import Generate, ReplicaJoined, ReplicaLost, RunStarted, Stop, TimerFired
from tailrace.protocol import Request as Sample
from tailrace.store.run import RunStore
from tailrace.wire.tls import Identity

TOKEN = "a-token-that-nobody-guesses"
FIGURES = b'{"secret": "figures"}'
DEADLINE_S = 20.0


QUICK = Limits(connections=8, request_s=0.5, idle_s=2.0, write_s=0.5)


class Reply(NamedTuple):
    status: int
    headers: Message
    content: bytes


class Page:
    """A server in a thread of its own."""

    def __init__(
        self,
        token: str | None = None,
        tls: bool = False,
        content: bytes = FIGURES,
        wait: Callable[[], object] = lambda: None,
    ) -> None:
        self.listener = PageListener(ListenAddress("127.0.0.1", 0), QUICK)
        self.port: int = self.listener.getsockname()[1]
        access = AccessControl(ListenAddress("192.0.2.1" if tls else "127.0.0.1", self.port), token)

        def answer(query: object) -> PageContent:
            wait()
            return PageContent('"tag"', content)

        app = PageApp(access, {"/data": answer})
        context = Identity().context if tls else None
        self.server = PageServer(AsgiApplication(app.respond, app.headers), self.listener, context)
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def send(self, *pieces: bytes) -> bytes:
        """All that is answered, until the page hangs up."""
        with closing(self.call()) as caller:
            for piece in pieces:
                caller.sendall(piece)
            return received(caller)

    def ask(self, method: str = "GET", target: str = "/", **headers: str) -> Reply:
        return self.request(method, target, None, headers)

    def request(self, method: str, target: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        caller = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        caller.request(method, target, body, {"Connection": "close", **named})
        answer = caller.getresponse()
        return Reply(answer.status, answer.headers, answer.read())


def received(caller: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):
        while piece := caller.recv(65536):
            found += piece
    return found


@pytest.fixture
def opened() -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def make(*arguments, **options) -> Page:
        pages.append(Page(*arguments, **options))
        return pages[-1]

    yield make
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """On the loopback, without a token; for tests that leave nothing behind."""
    made = Page()
    yield made
    made.close()


def response(caller: socket.socket) -> bytes:
    """One, on a connection that stays open."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += caller.recv(65536) or b"\r\n\r\n"
    head, _, body = found.partition(b"\r\n\r\n")
    while len(body) < int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]):
        body += caller.recv(65536)
    return head


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# ------------------------------------------------------------------------------------------------------------- answers

HOST = b"Host: localhost\r\n"
WRONG = {
    "not found": (404, b"GET /nowhere HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a path out of here": (404, b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n"),
    "an encoded path": (404, b"GET /%2e%2e/run.db HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a file of ours by its path": (404, b"GET /assets/page.js HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a query where there is none": (404, b"GET /page.js?run=1 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a query that cannot be read": (400, b"GET /data?run=1&run=2 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "another host's address": (404, b"GET http://localhost/data HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a method": (405, b"DELETE /data HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a form where there is none": (405, b"POST /data HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n"),
    "a tunnel": (404, b"CONNECT elsewhere:443 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "another name": (421, b"GET /data HTTP/1.1\r\nHost: rebound.example\r\n\r\n"),
    "another name that begins like ours": (421, b"GET /data HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n"),
    "no name": (421, b"GET /data HTTP/1.0\r\n\r\n"),
    "two names": (400, b"GET /data HTTP/1.1\r\n" + HOST + HOST + b"\r\n"),
    "a long head": (431, b"GET /data HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 4 * MAX_HEAD),
    "a long whole head": (431, b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"y" * MAX_HEAD + b"\r\n\r\n"),
    "a body": (413, b"GET /data HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\n"),
    "a long form": (413, b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 5000\r\n\r\n" + b"x" * 5000),
    "a long form in chunks": (
        413,
        b"POST /login HTTP/1.1\r\n"
        + HOST
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"400\r\n%b\r\n" % (b"x" * 1024) * 3,
    ),
    "a form on request": (
        417,
        b"POST /login HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    ),
    "a form on two requests": (
        417,
        b"POST /login HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\n" * 2 + b"Content-Length: 5\r\n\r\n",
    ),
    "a chunk that is none": (
        400,
        b"POST /login HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ),
    "a chunk that is none after a question for the head": (
        400,
        b"HEAD /data HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ),
    "two lengths": (400, b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx"),
    "no HTTP": (400, b"\x16\x03\x01\x02\x00\r\n\r\n"),
}


@pytest.mark.parametrize(("expected", "request_"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_and_dressed_like_every_answer(page, caplog, expected: int, request_: bytes) -> None:
    answer = page.send(request_.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    assert status(answer) == expected
    assert not caplog.records, "something went wrong in the server itself"
    assert FIGURES not in answer
    for name, value in SECURITY_HEADERS:
        assert f"\r\n{name}: {value}\r\n".encode() in answer
    assert b"\r\nServer:" not in answer


@pytest.mark.parametrize("target", ["/", "/data", "/login", "/page.css", "/charts.js", "/page.js", "/icon.svg"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_every_address_answers_with_all_headers(page, method: str, target: str) -> None:
    answer = page.ask(method, target)
    assert answer.status == 200
    assert all(answer.headers[name] == value for name, value in SECURITY_HEADERS)
    assert bool(answer.content) == (method == "GET")
    assert int(answer.headers["content-length"]) > 0


def test_figures_that_have_not_changed_are_not_sent_again(page) -> None:
    assert page.ask(target="/data").content == FIGURES
    again = page.ask(target="/data", If_None_Match='"tag"')
    assert (again.status, again.content) == (304, b"")


def test_many_requests_on_one_connection_are_answered_in_order(page) -> None:
    requests = [b"GET /data HTTP/1.1\r\n" + HOST + b"\r\n", b"HEAD /nowhere HTTP/1.1\r\n" + HOST + b"\r\n"] * 5
    answers = page.send(b"".join(requests), b"GET /x HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
    assert [int(each.split(b" ")[0]) for each in answers.split(b"HTTP/1.1 ")[1:]] == [200, 404] * 5 + [404]
    assert answers.count(FIGURES) == 5


def test_a_client_that_sends_no_more_is_still_answered(page) -> None:
    with closing(page.call()) as caller:
        caller.sendall(b"GET /data HTTP/1.1\r\n" + HOST + b"\r\n")
        caller.shutdown(socket.SHUT_WR)
        assert received(caller).endswith(FIGURES)


def test_who_still_works_on_an_answer_does_not_hold_up_the_end(opened) -> None:
    asked, never = threading.Event(), threading.Event()
    page = opened(wait=lambda: (asked.set(), never.wait()))
    with closing(page.call()) as caller:
        caller.sendall(b"GET /data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert asked.wait(DEADLINE_S)
        page.close()
        assert not page.thread.is_alive()
    never.set()


def test_a_refused_body_that_is_still_being_sent_does_not_reset_the_response(page) -> None:
    with closing(page.call()) as caller, suppress(ConnectionError):
        caller.sendall(b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 2000)
        answer = response(caller)
        caller.sendall(b"x" * 10_000)
        assert status(answer) == 413


def test_an_error_of_ours_is_a_response_with_all_headers(opened, monkeypatch, caplog) -> None:
    monkeypatch.setattr(PageApp, "respond", lambda *_: 1 / 0)
    answer = opened().ask()
    assert answer.status == 500
    assert all(answer.headers[name] == value for name, value in SECURITY_HEADERS)
    assert "ZeroDivisionError" in caplog.text


# ------------------------------------------------------------------------------------------------------------ the token


def test_with_a_token_only_who_has_it_sees_figures(opened, monkeypatch) -> None:
    monkeypatch.setattr("tailrace.page.app.WRONG_TOKEN_DELAY_S", 0.0)
    page = opened(TOKEN)
    assert page.ask(target="/data").status == 401
    assert page.ask(target="/").status == 401
    assert b"<form" in page.ask(target="/").content
    assert page.ask(target="/data", Authorization=f"Bearer {TOKEN}").content == FIGURES
    assert page.ask(target="/", Authorization=f"bearer {TOKEN}").status == 200
    for wrong in (f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", "Bearer é"):
        assert page.ask(target="/data", Authorization=wrong.encode("latin-1").decode("latin-1")).status == 401
    assert page.ask(target="/data", Cookie=f"tailrace-{page.port}={TOKEN}").status == 401


def form(page: Page, token: str, **headers: str) -> Reply:
    return page.request("POST", "/login", f"token={token}".encode(), headers)


def test_the_form_gives_a_cookie_for_the_token(opened, monkeypatch) -> None:
    monkeypatch.setattr("tailrace.page.app.WRONG_TOKEN_DELAY_S", 0.0)
    page = opened(TOKEN)
    assert b"not the token" in form(page, "wrong").content
    assert form(page, TOKEN, Sec_Fetch_Site="cross-site").status == 403
    assert form(page, TOKEN, Origin="https://evil.example").status == 403
    answer = form(page, TOKEN, Origin="null", Sec_Fetch_Site="same-origin")
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert TOKEN not in cookie
    value = cookie.split(";")[0]
    assert page.ask(target="/data", Cookie=f"other=1; {value}").content == FIGURES
    assert page.ask(target="/data", Cookie=value[:-1]).status == 401


def request(token: str, client: str = "203.0.113.1") -> PageRequest:
    return PageRequest("GET", "/data", (("authorization", f"Bearer {token}"),), client)


def test_guessing_gets_slow_and_never_keeps_out_who_has_the_token() -> None:
    """On the loopback all accounts of a machine have one address."""
    now = 0.0
    access = AccessControl(ListenAddress("192.0.2.1", 443), TOKEN, clock=lambda: now)
    assert [access.authenticate(request(f"guess-{number}")) for number in range(ATTEMPTS + 1)] == [
        "wrong"
    ] * ATTEMPTS + ["limited"]
    assert access.authenticate(request(TOKEN)) == "accepted"
    assert access.authenticate(request("another guess")) == "limited", "the right one of somebody else changes nothing"
    assert access.authenticate(request("a guess", "203.0.113.2")) == "wrong", "nor do the guesses of others"
    now = 11.0
    assert [access.authenticate(request("a guess")) for _ in range(2)] == ["wrong", "limited"]
    for number in range(3 * TRACKED_CLIENTS):
        access.authenticate(request("a guess", f"2001:db8:0:{number:x}::1"))
    assert len(access._attempts) <= TRACKED_CLIENTS  # pyright: ignore[reportPrivateUsage]
    assert WRONG_TOKEN_DELAY_S >= 1.0


def test_every_wrong_token_costs_a_connection_and_the_right_one_works_at_once(opened, monkeypatch) -> None:
    monkeypatch.setattr("tailrace.page.app.WRONG_TOKEN_DELAY_S", 0.01)
    page = opened(TOKEN)
    guess = b"GET /data HTTP/1.1\r\n" + HOST + b"Authorization: Bearer %b\r\n\r\n"
    answers = [page.send((guess % b"not-the-token") * 3) for _ in range(ATTEMPTS + 2)]
    assert [status(answer) for answer in answers] == [401] * ATTEMPTS + [429] * 2
    assert all(answer.count(b"HTTP/1.1 ") == 1 for answer in answers)
    assert form(page, "wrong").status == 429
    assert page.ask(target="/data", Authorization=f"Bearer {TOKEN}").content == FIGURES
    assert form(page, TOKEN).status == 303


def test_who_has_shown_the_token_is_not_pushed_out_by_strangers_who_ask(opened) -> None:
    page = opened(TOKEN)
    question = b"GET /data HTTP/1.1\r\n" + HOST + b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
    with closing(page.call()) as known:
        known.sendall(question)
        assert status(response(known)) == 200
        crowd = [page.call() for _ in range(3 * QUICK.connections)]
        for caller in crowd:
            with suppress(ConnectionError):
                caller.sendall(b"GET /login HTTP/1.1\r\n" + HOST + b"\r\n")
                caller.recv(65536)
        known.sendall(question)
        assert status(response(known)) == 200
        for caller in crowd:
            caller.close()


def test_a_session_ends_and_their_number_is_bounded() -> None:
    now = 0.0
    access = AccessControl(ListenAddress("192.0.2.1", 443), TOKEN, clock=lambda: now)
    cookies = [access.new_session().split(";")[0] for _ in range(100)]
    known = [access.authenticate(PageRequest("GET", "/", (("cookie", cookie),))) == "accepted" for cookie in cookies]
    assert (known[0], known[-1], sum(known)) == (False, True, 64)
    now = 13 * 3600.0
    assert access.authenticate(PageRequest("GET", "/", (("cookie", cookies[-1]),))) == "missing"


@pytest.mark.parametrize(
    ("listen", "token", "sentence"),
    [
        ("0.0.0.0:0", None, "a token is needed"),
        ("[::]:0", None, "a token is needed"),
        ("0.0.0.0:0", "short", "has 5 characters"),
        ("127.0.0.1:0", "short", "has 5 characters"),
        ("0.0.0.0:0", "x" * 600, "has 600 characters"),
        ("0.0.0.0:0", "with spaces in the middle", "spaces or special"),
        ("nowhere", None, "write ADDRESS:PORT"),
        ("example.com:80", None, "write ADDRESS:PORT"),
        ("127.0.0.1:99999", None, "write ADDRESS:PORT"),
        ("127.0.0.1:٣", None, "write ADDRESS:PORT"),
    ],
)
def test_an_address_open_to_others_without_a_token_is_refused(
    listen: str, token: str | None, sentence: str, monkeypatch
) -> None:
    if token is not None:
        monkeypatch.setenv("TAILRACE_PAGE_TOKEN", token)
    with pytest.raises(PageError, match=sentence):
        find_token(parse_listen(listen), None)


def test_a_token_comes_from_a_file_or_from_the_environment(tmp_path: Path, monkeypatch) -> None:
    place = parse_listen("[::1]:80")
    assert place.loopback
    assert find_token(place, None) is None
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("TAILRACE_PAGE_TOKEN", "another-token-of-this-page")
    assert find_token(place, tmp_path / "token") == TOKEN
    with pytest.raises(PageError, match="cannot be read"):
        find_token(place, tmp_path / "nowhere")


def test_off_the_loopback_everything_is_encrypted(opened) -> None:
    page = opened(TOKEN, tls=True)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    caller = http.client.HTTPSConnection("127.0.0.1", page.port, context=context, timeout=DEADLINE_S)
    caller.request("POST", "/login", f"token={TOKEN}", {"Host": "any.name"})
    answer = caller.getresponse()
    cookie = answer.headers["Set-Cookie"]
    assert (answer.status, answer.read()) == (303, b"")
    assert cookie.startswith(f"__Host-tailrace-{page.port}=")
    assert "Secure" in cookie.split("; ")
    assert answer.headers["Strict-Transport-Security"]
    caller.request("GET", "/data", headers={"Cookie": cookie.split(";")[0]})
    assert caller.getresponse().read() == FIGURES
    caller.close()
    assert b"HTTP" not in page.send(b"GET /data HTTP/1.1\r\n" + HOST + b"\r\n"), "not without TLS"


# --------------------------------------------------------------------------------------------------------------- limits


def test_silent_and_slow_visitors_are_hung_up_on(opened) -> None:
    page = opened()
    for beginning in (b"", b"GET /data HT", b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\ntok"):
        assert FIGURES not in page.send(beginning)


@pytest.mark.parametrize("more", [b"", b"GET /da", b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\n"])
def test_after_a_response_the_next_request_has_its_time_and_no_more(page, more: bytes) -> None:
    answers = page.send(b"GET /data HTTP/1.1\r\n" + HOST + b"\r\n" + more)
    assert (answers.count(b"HTTP/1.1 "), answers.count(FIGURES)) == (1, 1)


def test_a_head_that_trickles_is_cut_off(opened) -> None:
    began = time.monotonic()
    with closing(opened().call()) as caller, suppress(ConnectionError):
        while time.monotonic() < began + DEADLINE_S:
            caller.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() < began + DEADLINE_S


def test_silent_visitors_keep_nobody_out(opened) -> None:
    """More than there is room for, some in the middle of a request: the newest client is served all the same."""
    page = opened(content=b"x" * 100)
    silent = [page.call() for _ in range(5 * QUICK.connections)]
    for place, caller in enumerate(silent):
        with suppress(ConnectionError):
            caller.sendall(b"GET / HT" if place % 2 else b"")
    assert page.ask(target="/data").status == 200
    assert len(page.listener.connected()) <= QUICK.connections
    for caller in silent:
        caller.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_crowd_takes_no_more_descriptors_than_there_is_room_for(opened, tls: bool) -> None:
    """Most are sent away before anything was done for them; that must not leave their sockets behind."""
    page = opened(TOKEN, tls=tls)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, crowd = descriptors(), []
    gc.disable()  # it would tidy up some day
    try:
        crowd += [page.call() for _ in range(20 * QUICK.connections)]
        limit = time.monotonic() + DEADLINE_S
        while descriptors() > before + len(crowd) + QUICK.connections and time.monotonic() < limit:
            time.sleep(0.02)
        assert descriptors() <= before + len(crowd) + QUICK.connections
    finally:
        gc.enable()
        for caller in crowd:
            caller.close()


def test_silent_visitors_of_an_encrypted_page_keep_nobody_out(opened) -> None:
    page = opened(TOKEN, tls=True)
    silent = [page.call() for _ in range(5 * QUICK.connections)]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    caller = http.client.HTTPSConnection("127.0.0.1", page.port, context=context, timeout=DEADLINE_S)
    caller.request("GET", "/login")
    assert caller.getresponse().status == 200
    for each in [*silent, caller]:
        each.close()


def test_who_does_not_read_is_cut_off(opened) -> None:
    """Asks for a lot and reads nothing: the page lets go, and has not kept it all in memory."""
    page = opened(content=b"x" * 4_000_000)
    with closing(socket.socket()) as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # or the kernel takes what its machine allows
        caller.settimeout(DEADLINE_S)
        caller.connect(("127.0.0.1", page.port))
        caller.sendall((b"GET /data HTTP/1.1\r\n" + HOST + b"\r\n") * 100)
        limit = time.monotonic() + DEADLINE_S
        while page.server.server_state.connections and time.monotonic() < limit:
            time.sleep(0.02)
        assert not page.server.server_state.connections
        assert len(received(caller)) < 40_000_000


# ------------------------------------------------------------------------------------------------------------ following


@pytest.fixture
def config() -> Config:
    return load([], ["--model.preset", "qwen2.5-7b", "--run.steps", "7"])


def shown(follower: Follower) -> dict:
    return json.loads(follower.latest.content)


def test_a_run_is_followed_while_it_goes_on_and_beyond(tmp_path: Path, config: Config) -> None:
    store = RunStore.create(tmp_path / "run", config)
    store.record(0.0, RunStarted(1, 1), [])
    store.commit()
    follower = Follower(tmp_path / "run")
    assert (shown(follower)["about"]["ended"]["state"], shown(follower)["read"]) == ("running", 1)
    first = follower.latest.tag
    store.record(1.0, ReplicaJoined(0, 1, 0, -1, 1000, 8), [])
    store.record(2.0, ReplicaLost(0, 1, "<script>alert(1)</script>"), [])
    store.metrics.measure(2.0, 0, "trainer", {"loss": 0.25})
    store.commit()
    follower.poll()
    found = shown(follower)
    assert follower.latest.tag != first
    assert (found["read"], found["faults"], found["run"]["measured"]) == (3, 1, {"loss": 0.25})
    assert [lane["name"] for lane in found["charts"]["lanes"]] == ["trainer", "r0"]
    assert found["sentences"][-1]["text"].startswith("lost (incarnation 1)")
    assert found["run"]["ledger"]["started"] == sum(
        value for key, value in found["run"]["ledger"].items() if key != "started"
    )
    store.close(complete=False)
    follower.poll()
    assert shown(follower)["about"]["ended"] == {"state": "interrupted", "reason": ""}
    RunStore.reopen(tmp_path / "run").close(complete=False, failed="no replica is left")
    follower.poll()
    assert shown(follower)["about"]["ended"] == {"state": "failed", "reason": "no replica is left"}
    with RunStore.reopen(tmp_path / "run") as store:
        store.commit()
        follower.poll()
        assert shown(follower)["about"]["ended"]["state"] == "running"
        store.meta.set("accuracy_before", "0.25")
        store.meta.set("reward_before", "no number")
        store.record(3.0, ReplicaJoined(0, 2, 0, -1, 1000, 8), [Generate(0, 2, (Sample(0, 1, 0, 0, 4),))])
        store.record(4.0, TimerFired("health"), [Stop("all steps are done")])
        store.close(complete=True)
    follower.poll()
    found = shown(follower)
    about = found["about"]
    assert about["ended"] == {"state": "complete", "reason": "all steps are done"}
    assert (about["accuracy"]["before"], about["mean_reward"]["before"], about["right_above"]) == (0.25, None, 0.5)
    assert [one["state"] for one in found["run"]["replicas"]] == ["ended"]
    assert found["run"]["trainer"] == "ended"


def test_looking_does_not_stand_in_the_way_of_who_resumes(tmp_path: Path, config: Config) -> None:
    RunStore.create(tmp_path / "run", config).close(complete=False)
    stop = threading.Event()

    def poll() -> None:
        follower = Follower(tmp_path / "run")
        while not stop.wait(0.001):  # a reader that never pauses would only compete for the interpreter
            follower.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(50):
            RunStore.reopen(tmp_path / "run").close(complete=False)
    finally:
        stop.set()
        thread.join(DEADLINE_S)


def test_what_cannot_be_read_is_told_and_tried_again(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    with RunStore.create(run, config) as store:
        store.record(0.0, RunStarted(1, 1), [])
    follower = Follower(run)
    whole = (run / "run.db").read_bytes()
    (run / "run.db").write_bytes(whole[: len(whole) // 2])
    assert follower.poll() is False
    assert "cut in the middle" in shown(follower)["about"]["trouble"]
    shutil.rmtree(run)
    follower.poll()
    assert "there is no run" in shown(follower)["about"]["trouble"]
    other = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="other"))
    with RunStore.create(run, other) as store:
        store.meta.set("created", "2030-01-01")
    follower.poll()
    assert (shown(follower)["about"]["name"], shown(follower)["read"]) == ("other", 0)
    assert shown(follower)["about"]["trouble"] == ""


def test_curves_stay_small_and_lose_nothing() -> None:
    curve = Curve()
    steps = 20 * POINTS + 7
    for number in range(steps):
        curve.add(
            StepRecord(number, number + 1.0, 4, 8, 100, 0.5, Staleness(1.0, 2.0, number % 5)), first_sample_at=0.0
        )
    assert POINTS // 2 <= len(curve.points) <= POINTS
    assert sum(point.tokens for point in curve.points) == 100 * steps
    assert curve.points[-1].step == steps
    assert {tuple(row[2:5]) for row in curve.rows()} == {(0.5, 100.0, 1.0)}


def test_lanes_stay_small_and_cover_all_of_the_time() -> None:
    lane = Lane(0.0, keep_spans=True)
    for number in range(50_000):
        lane.enter(("generating", "pulling", "idle")[number % 3], float(number))
        if number % 1000 == 0:
            view = lane_view("r0", lane, number + 0.5)
            assert len(view.ends) <= SPANS + 1
            assert (view.start, view.ends[-1]) == (0.0, number + 0.5)
            assert view.ends == sorted(view.ends)


def test_every_state_has_a_letter_of_its_own_that_the_page_knows_and_a_colour() -> None:
    script, style = asset("charts.js"), asset("page.css")
    known = dict(re.findall(r'(\w): "(\w+)"', script.partition("const STATES = {")[2].partition("}")[0]))
    lane = Lane(0.0, keep_spans=True)
    for number, state in enumerate((*COUNTED, "starting")):
        lane.enter(state, float(number + 1))
    view = lane_view("r0", lane, 20.0)
    assert [known[letter] for letter in view.states] == ["starting", *COUNTED, "starting"]
    assert all(f".{state} {{" in style for state in known.values())


def test_the_page_of_a_run_is_saved_as_one_file(tmp_path: Path, config: Config) -> None:
    with RunStore.create(tmp_path / "run", config) as store:
        store.record(0.0, RunStarted(1, 1), [])
        store.record(1.0, ReplicaLost(0, 1, "</script><script>alert(1)</script>"), [])
    command = [sys.executable, "-m", "tailrace", "page", "run", "--save", "out.html"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    saved = (tmp_path / "out.html").read_text(encoding="utf-8")
    data = json.loads(re.findall(r'id="data">(.*?)</script>', saved, re.DOTALL)[0])
    assert data["/data?run=0"] == shown(Follower(tmp_path / "run"))
    assert "alert(1)" in data["/data?run=0"]["run"]["notices"][-1][1]
    assert "steps = 7" in data["/config"]["config"]
    assert "<script>alert" not in saved
    assert not re.search(r'(?:src|href)="(?!#)', saved), "it needs no server"


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["page", "nowhere"], "there is no run nowhere"),
        (["page", "run", "--listen", "0.0.0.0:0"], "a token is needed"),
        (["page", "run", "--listen", "203.0.113.77:1", "--token-file", "token"], "cannot listen on 203.0.113.77:1"),
        (["page", "run", "--token", TOKEN], "page has no option --token"),
        (["page", "run", "--save", "out.pdf"], "write a name that ends in .html"),
        (["page", "run", "--save", "nowhere/out.html"], "cannot be written (No such file or directory)"),
        (["page", "run", "--save", "out.html", "--listen", "127.0.0.1:0"], "leave out --listen"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, config: Config, words: list[str], sentence: str) -> None:
    RunStore.create(tmp_path / "run", config).close(complete=True)
    (tmp_path / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "tailrace", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert sentence in done.stderr


def test_other_commands_do_not_load_it() -> None:
    program = "import sys; from tailrace.cli import main; main(['--help'])"
    program = f"import sys, atexit; atexit.register(lambda: print(*sys.modules)); {program}"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout.split()
    assert "tailrace.cli" in loaded
    assert not {"uvicorn", "h11", "asyncio", "tailrace.page"} & set(loaded)
    assert MAX_BODY < MAX_HEAD


def test_what_is_refused_does_not_make_its_process_slower(tmp_path: Path, config: Config) -> None:
    RunStore.create(tmp_path / "run", config).close(False)
    before = os.nice(0), sys.getswitchinterval()
    assert main(["page", str(tmp_path / "run"), "--listen", "0.0.0.0:0"]) == 2
    assert (os.nice(0), sys.getswitchinterval()) == before
