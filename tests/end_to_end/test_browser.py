"""`tailrace page` on real runs, seen through a real browser; and a run that does not mind what becomes of its page."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from browser import browser, page_of
from runs import DEADLINE_S, EMULATED, Run, replayed
from tailrace.obs.summary import summarise

TOKEN = "a-token-that-nobody-guesses"


def figures(address: str) -> dict:
    caller = http.client.HTTPConnection(address.split("/")[2], timeout=DEADLINE_S)
    caller.request("GET", "/data")
    content = caller.getresponse().read()
    caller.close()
    return json.loads(content)


def test_a_browser_shows_the_figures_of_a_run(tmp_path: Path) -> None:
    judged = ("--workload.reward_s", "0.5", "--schedule.max_staleness", "1")  # so that replicas wait for the judge
    run = Run(tmp_path, EMULATED, *judged)
    run.finish()
    summary, live, _ = summarise(run.folder)
    counts = summary.ledger
    with page_of(run.folder) as (child, address), browser(tmp_path) as seen:
        seen.resize(1280, 1000)
        seen.open(address)
        seen.until("document.title === 'run · complete'")
        assert seen.text("pace").startswith("step 12 of 12")
        # as browsers round: halves up
        assert seen.text("staleness") == str(Decimal(summary.staleness.mean).quantize(Decimal("0.01"), ROUND_HALF_UP))
        ends = (
            f"{counts.trained} trained+{counts.dropped_stale} stale+{counts.filtered} filtered+{counts.failed} failed"
        )
        assert seen.text("ledger") == f"{counts.started} started={ends}+{counts.in_flight} in flight"
        assert (
            seen.ask("document.querySelectorAll('#chart-rate .area.rate, #chart-staleness .line.staleness').length")
            == 2
        )
        assert seen.ask("document.querySelectorAll('#timeline rect.generating').length") > 0
        assert seen.ask("document.querySelectorAll('#timeline rect.scoring').length") > 0
        assert "judging" in seen.text("legend")
        assert seen.ask("document.querySelectorAll('#replicas tr').length") == len(live.activity.replicas)
        assert "v12 made by step 11" in seen.text("sentences")
        assert "starting the trainer, 1 relay and" in seen.text("notices")
        for width in (1280, 390):
            seen.resize(width, 800)
            assert seen.ask("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        assert seen.complaints == []
        page = {id: seen.text(id) for id in ("pace", "staleness", "ledger", "legend", "replicas", "sentences")}
        child.send_signal(signal.SIGINT)
        assert child.wait(DEADLINE_S) == 0
        seen.until("document.getElementById('trouble').textContent.startsWith('No answer from the page')")
        report = tmp_path / "report.html"
        command = [sys.executable, "-m", "tailrace", "page", str(run.folder), "--save", str(report)]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        seen.open(report.as_uri())
        seen.until("document.title === 'run · complete'")
        assert {id: seen.text(id) for id in page} == page, "the report shows what the page showed"
        assert seen.ask("document.querySelectorAll('#charts .line').length") == 3


def test_a_browser_draws_the_report_of_simulations(tmp_path: Path) -> None:
    box = Path(__file__).parents[2] / "examples" / "clusters" / "own_box.toml"
    for gpus, lines in (("16", 0), ("16,32", 7)):
        plot = tmp_path / f"{gpus}.html"
        command = [sys.executable, "-m", "tailrace", "simulate", str(box), "--gpus", gpus, "--run.steps", "2"]
        subprocess.run([*command, "--plot", str(plot)], check=True, capture_output=True, timeout=DEADLINE_S)
        with browser(tmp_path / gpus) as seen:
            seen.resize(1280, 1000)
            seen.open(plot.as_uri())
            seen.until("document.querySelectorAll('#results td').length > 0")
            assert seen.ask("document.querySelectorAll('#throughput .line').length") == lines
            assert seen.ask("document.querySelectorAll('#throughput .bar').length") == (0 if lines else 6)
            assert seen.ask("document.querySelectorAll('#strips .strip rect.generating').length") > 5
            assert seen.text("legend").startswith("generating")
            assert seen.complaints == []


def test_what_a_run_says_is_only_ever_text_and_nothing_else_runs(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    run = Run(tmp_path, EMULATED, "--run.steps", "2", "--run.name", name)
    run.folder = run.folder.with_name(name)
    run.finish()
    with page_of(run.folder) as (_, address), browser(tmp_path) as seen:
        seen.open(address)
        seen.until("document.getElementById('state')?.textContent === 'complete'")
        assert seen.text("name") == name
        assert seen.ask("document.images.length") == 0
        assert seen.complaints == []
        foreign = "Object.assign(document.createElement('img'), {src: 'https://elsewhere.example/x'})"
        seen.ask(f"document.body.append({foreign})")
        seen.until("document.images.length === 1")
        assert "Content Security Policy" in "".join(seen.complaints), "the browser enforces it, and we would notice"


def test_the_form_opens_the_page_to_who_has_the_token(tmp_path: Path) -> None:
    """With TLS and the cookie of a real browser."""
    run = Run(tmp_path, EMULATED, "--run.steps", "2")
    run.finish()
    (tmp_path / "token").write_text(TOKEN)
    options = ("--listen", "0.0.0.0:0", "--token-file", str(tmp_path / "token"))
    with page_of(run.folder, *options) as (_, address), browser(tmp_path) as seen:
        assert address.startswith("https://")
        seen.open(f"https://127.0.0.1:{address.rstrip('/').rpartition(':')[2]}/")
        for word in ("wrong", TOKEN):
            seen.until("document.readyState === 'complete' && !!document.querySelector('form')")
            fill = f"document.querySelector('input').value = '{word}'; document.title = 'old'"
            seen.ask(f"{fill}; document.querySelector('form').requestSubmit()")
            seen.until("document.title !== 'old'")
        seen.until("document.title === 'run · complete'")
        assert seen.ask("document.cookie") == "", "no script sees it"


def test_a_run_does_not_mind_what_becomes_of_its_page(tmp_path: Path) -> None:
    """Killed, frozen and started again while the run goes on."""
    run = Run(tmp_path, EMULATED, "--run.steps", "30").start()
    run.until(lambda: run.events("Trained") > 4, "some steps")
    with page_of(run.folder) as (frozen, first):
        assert figures(first)["about"]["ended"]["state"] == "running"
        frozen.send_signal(signal.SIGSTOP)
        for _ in range(3):
            with page_of(run.folder) as (child, address):
                assert figures(address)["run"]["steps"] > 0
                child.kill()
        status, out, err = run.wait()
        assert status == 0, (out, err)
        frozen.send_signal(signal.SIGCONT)
        limit = time.monotonic() + DEADLINE_S
        while (found := figures(first))["about"]["ended"]["state"] != "complete" or found["about"]["behind"]:
            assert time.monotonic() < limit, f"the page has not seen the end within {DEADLINE_S} s"
            time.sleep(0.1)
    assert found["run"]["steps"] == 30
    assert found["about"]["trouble"] == ""
    counts = found["run"]["ledger"]
    assert counts["started"] == sum(value for key, value in counts.items() if key != "started")
    replayed(run)
