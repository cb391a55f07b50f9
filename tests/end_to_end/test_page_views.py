"""The page as a place to work, in a real browser: samples, search, prompts, metrics, timeline, logs, runs, report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from browser import Browser, browser, page_of
from runs import DEADLINE_S
from sample_runs import Written, piece_of, written_run
from sample_stores import put
from tailrace.protocol import RecordEvaluation, TimerFired
from tailrace.scoring import EvalResult

HOSTILE = "<img src=x onerror=alert(1)> \u202eevil\x1b[2J"
VIEWS = ("overview", "samples", "sample?id=1", "group?id=0", "prompts", "metrics", "timeline", "settings", "runs")
BOX = Path(__file__).parents[2] / "examples" / "clusters" / "own_box.toml"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    folder = tmp_path_factory.mktemp("page") / "runs"
    for name, loss in (("first", 0.5), ("second", 0.25)):
        with written_run(folder / name, options=["--run.name", name]) as written:
            written.ask("what is six times seven", "name a river", rows=[7, 9])
            written.answer(
                Written(0, ["it is forty two"], 1.0, parts={"format": 0.5}),
                Written(0, ["<tool>6 * 7</tool>", "42", HOSTILE], 0.0, version=1),
                Written(1, ["the Danube"], 1.0, version=1),
                Written(1, ["the rewa"], None, reason="the reward raised ValueError: no number"),
            )
            for version, share in ((0, 0.25), (10, 0.5), (20, 0.375)):
                results = tuple(evaluated(name, share) for name in ("held_out", "aime"))
                told = RecordEvaluation(version, results, 1.5, best=(10, 20))
                written.store.record(5.0 + version, TimerFired("eval"), [told])
            for step in range(5):
                written.store.metrics.measure(float(step), step, "trainer", {"loss": loss / (step + 1)})
        (folder / name / "logs").mkdir()
        (folder / name / "logs" / "trainer0.log").write_text(f"this is the log of {name}\n")
    return folder


def evaluated(name: str, share: float) -> EvalResult:
    return EvalResult(name, 8, 4, share, {1: share, 2: share, 4: min(1.0, 2 * share)}, share - 0.125, 30.0, 0.0)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        opened.resize(1280, 900)
        yield opened


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with page_of(runs / "first", str(runs / "second")) as (_, found):
        yield found


def show(seen: Browser, address: str, view: str) -> None:
    """As a fresh page: nothing of the view before is left."""
    seen.open("about:blank")
    seen.complaints.clear()
    seen.open(f"{address}#{view}")
    seen.until("document.getElementById('state')?.textContent === 'complete'")


def tailrace(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "tailrace", *words], check=True, capture_output=True, timeout=DEADLINE_S)


def test_samples_are_browsed_one_in_full_and_a_group_side_by_side(seen: Browser, address: str) -> None:
    show(seen, address, "samples")
    seen.until("document.querySelectorAll('#samples-rows tr').length === 4")
    assert "1 to 4 of 4 samples" in seen.text("samples-count")
    seen.ask("[...document.querySelectorAll('#samples-rows a')].find(a => a.textContent === 't1').click()")
    seen.until("document.getElementById('sample-name').textContent === 'Sample t1'")
    text = seen.text("sample-text")
    assert "<img src=x onerror=alert(1)> \\u{202e}evil\\u{1b}[2J" in text, "hostile text is only ever text"
    assert "calls a tool: 6 * 7" in text
    assert "advantage-0.7071" in seen.text("sample-facts")
    assert seen.ask("document.images.length") == 0
    coloured = "[...document.querySelectorAll('#sample-text .policy span')].map(s => s.style.background)"
    by_logprob = seen.ask(f"{coloured}.join()")
    assert len(set(by_logprob.split("),"))) > 3
    for how in ("version", "advantage", "none"):
        chosen = "document.querySelector('[data-view=sample] select')"
        seen.ask(f"{chosen}.value = '{how}'; {chosen}.dispatchEvent(new Event('change'))")
        assert len(set(seen.ask(coloured))) == 1, "one version, one advantage"
    seen.ask("document.querySelector('#sample-links a').click()")
    seen.until("document.querySelectorAll('#group-columns .member').length === 2")
    assert "reward 1.000 · advantage 0.707" in seen.text("group-columns")
    assert "what is six times seven" in seen.text("group-prompt")
    assert seen.complaints == []


def test_a_sample_grows_on_the_page_while_it_is_generated(seen: Browser, tmp_path: Path) -> None:
    with written_run(tmp_path / "run") as written:
        written.ask("count")
        request = written.begin(Written(0, ["one two"]))
        with page_of(tmp_path / "run") as (_, address):
            seen.open("about:blank")
            seen.open(f"{address}#sample?id=0")
            seen.until("document.getElementById('sample-text')?.textContent.endsWith('one two')")
            put(written.file, 0, request.trajectory, 1, 7, piece_of(" three", 0))
            written.file.commit()
            seen.until("document.getElementById('sample-text').textContent.endsWith('one two three')")


def test_the_focus_goes_into_a_view_and_stays_where_it_is_while_the_list_grows(seen: Browser, tmp_path: Path) -> None:
    held = "document.activeElement.textContent"
    with written_run(tmp_path / "run") as written:
        written.ask("count")
        written.answer(Written(0, ["one"]))
        with page_of(tmp_path / "run") as (_, address):
            seen.open("about:blank")
            seen.complaints.clear()
            seen.open(f"{address}#overview")
            seen.until("document.getElementById('state')?.textContent === 'running'")
            seen.ask("document.querySelector('nav a[href^=\"#samples\"]').click()")
            seen.until("document.activeElement.dataset.view === 'samples'")
            seen.until("document.querySelectorAll('#samples-rows tr').length === 1")
            seen.ask("document.querySelector('#samples-rows a').focus()")
            written.answer(Written(0, ["two"]))
            written.store.commit()
            seen.until("document.querySelectorAll('#samples-rows tr').length === 2")
            assert (seen.ask(held), seen.text("samples-count")) == ("t0", "1 to 2 of 2 samples")
            seen.ask("document.activeElement.click()")
            seen.until("document.activeElement.dataset.view === 'sample'")
            assert seen.complaints == []


def test_what_a_reward_failed_on_is_read_with_its_error(seen: Browser, tmp_path: Path) -> None:
    with written_run(tmp_path / "run") as written:
        written.ask("name a river")
        written.answer(Written(0, [f"the Danube {HOSTILE}"], None, reason="KeyError: 'Danube'"))
        written.answer_again(0, 2, Written(0, ["the Rhine"], 1.0, version=1))
        written.answer(Written(0, ["the Elbe"], None, reason="ValueError: no number"))
    with page_of(tmp_path / "run") as (_, address):
        show(seen, address, "samples?error=Danube")
        seen.until("document.querySelectorAll('#samples-rows tr').length === 1")
        assert "KeyError: 'Danube' | the Danube <img" in seen.text("samples-rows")
        seen.ask("document.querySelector('#samples-rows a').click()")
        seen.until("document.getElementById('sample-name').textContent === 'Sample t0'")
        text = seen.text("sample-text")
        assert text.index("the Rhine") < text.index("Attempt 1 failed") < text.index("the Danube <img")
        assert seen.ask("document.images.length") == 0
        seen.open(f"{address}#sample?id=1")
        seen.until("document.getElementById('sample-name').textContent === 'Sample t1'")
        assert "the Elbe" in seen.text("sample-text")
        assert "why it failedValueError: no number" in seen.text("sample-facts")
        assert seen.complaints == []


def test_samples_are_searched_by_text_and_filtered(seen: Browser, address: str) -> None:
    show(seen, address, "samples")
    seen.ask("filterForm().elements.text.value = 'forty two'; filterForm().requestSubmit()")
    seen.until("document.querySelectorAll('#samples-rows tr').length === 1")
    assert "it is forty two" in seen.text("samples-rows")
    seen.until("document.getElementById('index-state').textContent.startsWith('text index: 4 samples, 0.')")
    seen.ask("filterForm().elements.text.value = ''; filterForm().elements.error.value = 'valueerror'")
    seen.ask("filterForm().requestSubmit()")
    seen.until("document.getElementById('samples-rows').textContent.startsWith('t3g1failed')")
    assert seen.ask("location.hash") == "#samples?error=valueerror", "a search can be sent as a link"


def test_prompts_that_fail_are_listed(seen: Browser, address: str) -> None:
    show(seen, address, "prompts?order=failing")
    seen.until("document.querySelectorAll('#prompts-rows tr').length === 2")
    cells = seen.ask(
        "[...document.querySelectorAll('#prompts-rows tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert [(row[0], row[1], row[4], row[7]) for row in cells] == [
        ("row 9", "50 %", "1", "name a river"),
        ("row 7", "50 %", "0", "what is six times seven"),
    ]


def test_two_runs_are_compared(seen: Browser, address: str) -> None:
    show(seen, address, "runs")
    seen.until("document.querySelectorAll('#runs-rows input').length === 2")
    seen.ask("document.querySelectorAll('#runs-rows input').forEach(box => box.click())")
    seen.ask("document.getElementById('compare').click()")
    chart = "document.querySelector('#metric-charts [data-name=\"trainer:loss\"]')"
    seen.until(f"{chart}?.querySelectorAll('.line:not(.faint)').length === 2")
    assert seen.ask(f"{chart}.querySelector('.legend').textContent") == "firstsecond"
    before = seen.ask(f"{chart}.querySelector('.line:not(.faint)').getAttribute('d')")
    seen.ask("document.getElementById('metric-log').click()")
    seen.until(f"{chart}.querySelector('.line:not(.faint)').getAttribute('d') !== {json.dumps(before)}")
    box = f"{chart}.querySelector('svg').getBoundingClientRect()"
    x, y = seen.ask(f"{box}.right") - 13, seen.ask(f"{box}.top") + 20
    seen.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    seen.until("document.getElementById('tip').textContent.startsWith('step 5\\nfirst: ')")
    smooth = "document.getElementById('metric-smooth')"
    seen.ask(f"{smooth}.value = 0; {smooth}.dispatchEvent(new Event('input'))")
    assert seen.ask("location.hash").endswith("&log=1&smooth=0")
    seen.ask("location.reload()")
    seen.until(f"{chart}?.querySelectorAll('.line').length === 2")
    assert seen.ask(f"[document.getElementById('metric-log').checked, {smooth}.value]") == [True, "0"]


def test_the_address_says_which_run_is_shown(seen: Browser, address: str) -> None:
    show(seen, address, "runs")
    seen.until("document.querySelectorAll('#runs-rows a').length === 2")
    assert seen.ask("document.querySelector('#runs-rows tr').innerText").split("\t")[4:6] == ["0 of 10", "–"]
    seen.ask("document.querySelectorAll('#runs-rows a')[1].click()")
    seen.until("document.getElementById('name').textContent === 'second'")
    seen.ask("document.querySelector('nav a[href^=\"#settings\"]').click()")
    seen.until("document.getElementById('log-text').textContent === 'this is the log of second\\n'")
    assert seen.ask("location.hash") == "#settings?run=1"
    seen.ask("location.hash = '#settings'")
    seen.until("document.getElementById('log-text').textContent === 'this is the log of first\\n'")


def test_evaluations_while_training_are_curves_by_version(seen: Browser, address: str) -> None:
    show(seen, address, "overview")
    seen.until("document.querySelectorAll('#eval-charts figure:not([hidden]) .line').length === 6")
    titles = seen.ask("[...document.querySelectorAll('#eval-charts figcaption')].map(c => c.textContent)")
    assert [title.split()[1] for title in titles] == ["avg@4", "pass@4", "mean"]
    assert seen.text("evaluations-best") == "best versions so far: v10, v20"
    box = "document.getElementById('eval-passed').getBoundingClientRect()"
    x, y = seen.ask(f"{box}.right") - 13, seen.ask(f"{box}.top") + 20
    seen.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    seen.until("document.getElementById('tip').textContent === 'v20\\nheld_out: 0.75\\naime: 0.75'")
    assert seen.complaints == []


def test_settings_and_logs_are_shown(seen: Browser, address: str) -> None:
    show(seen, address, "settings?run=1")
    seen.until("document.getElementById('log-text').textContent === 'this is the log of second\\n'")
    assert 'name = "second"' in seen.text("config-text")
    seen.ask("document.getElementById('config-find').value = 'group_size'")
    seen.ask("document.getElementById('config-find').dispatchEvent(new Event('input'))")
    lines = [line for line in seen.text("config-text").splitlines() if not line.startswith("[")]
    assert lines == ["group_size = 2"]


def test_the_timeline_zooms_and_shows_what_repack_moved(seen: Browser, tmp_path: Path) -> None:
    record = ["--schedules", "trajectory", "--gpus", "16", "--run.steps", "3", "--record", str(tmp_path / "run")]
    tailrace("simulate", str(BOX), *record)
    trace = tmp_path / "trace.json"
    tailrace("trace", str(tmp_path / "run"), "-o", str(trace))
    arrows = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "s"]
    with page_of(tmp_path / "run") as (_, address):
        show(seen, address, "timeline")
        seen.until(f"laneView.data?.moves.length === {min(400, len(arrows))}")
        assert seen.ask("new Set(laneView.data.lanes.flatMap(lane => lane.versions)).size") > 2
        count = "const curve = CanvasRenderingContext2D.prototype.bezierCurveTo; globalThis.drawn = 0;"
        count += "CanvasRenderingContext2D.prototype.bezierCurveTo = function (...p) { drawn++; curve.apply(this, p); }"
        seen.ask(f"{{ {count} }}; laneView.draw()")
        assert seen.ask("drawn") > 0, "arrows"
        whole = seen.ask("laneView.until - laneView.begin")
        seen.ask("document.getElementById('lanes').focus()")
        for key in ("+", "+", "ArrowRight"):
            seen.tell("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if key == "+" else "")
        seen.until(
            f"Math.abs(laneView.data.end - laneView.data.begin - {whole} * .36) < 1e-3 && laneView.data.begin > 0"
        )
        seen.ask("document.getElementById('lanes-colour').value = 'version'; laneView.draw()")
        assert seen.text("lanes-legend").startswith("v0v1")
        seen.ask("document.getElementById('zoom-all').click()")
        seen.until(f"laneView.data.end - laneView.data.begin > {whole} - .01")
        assert seen.complaints == []


def test_a_report_is_one_file_with_all_views(seen: Browser, runs: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    tailrace("report", str(runs / "first"), str(runs / "second"), "-o", str(report))
    for view in VIEWS:
        show(seen, report.as_uri(), view)
        seen.until(f"document.querySelector('[data-view={view.partition('?')[0]}]').hidden === false")
        assert seen.text("trouble") == ""
    show(seen, report.as_uri(), "sample?id=1")
    seen.until("document.getElementById('sample-text').textContent.includes('<img src=x onerror=alert(1)>')")
    show(seen, report.as_uri(), "metrics?compare=0,1")
    seen.until(
        "document.querySelectorAll('#metric-charts [data-name=\"trainer:loss\"] .line:not(.faint)').length === 2"
    )
    assert seen.complaints == []
    show(seen, report.as_uri(), "samples?run=1")
    seen.until("document.getElementById('trouble').textContent.startsWith('this is not part of the report')")


def test_axe_finds_nothing_serious_and_nothing_sticks_out(seen: Browser, address: str) -> None:
    """By the axe of a package, or by the one that AXE_CORE names."""
    own = files("axe_core_python") / "axe.min.js"
    axe = Path(os.environ.get("AXE_CORE") or str(own)).read_text()
    serious = "r.violations.filter(v => ['serious', 'critical'].includes(v.impact)).map(v => [v.id, v.nodes[0].html])"
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
        seen.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        seen.resize(width, 900)
        for view in VIEWS:
            show(seen, address, view)
            seen.tell("Runtime.evaluate", expression=axe)
            run = f"axe.run().then(r => JSON.stringify({serious}))"
            found = seen.tell("Runtime.evaluate", expression=run, awaitPromise=True, returnByValue=True)
            assert json.loads(found["result"]["value"]) == [], (scheme, width, view)
            assert seen.ask("document.documentElement.scrollWidth <= innerWidth"), (width, view)
    seen.resize(1280, 900)
