"""Prices that are set while a run goes on: the file, the command, what control is told, and what was spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from drive import Drive, config
from tailrace.cli import main
from tailrace.config import ConfigError, load
from tailrace.config.tree import Config
from tailrace.obs.spending import Spending
from tailrace.protocol import Activate, GiveUp, HostJoined, PriceChanged, ReplicaJoined, RunStarted
from tailrace.runtime.prices import price_changes
from tailrace.store.errors import JournalError
from tailrace.store.journal import JournalWriter
from tailrace.store.prices import FILE, PriceFile, set_price


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with JournalWriter(tmp_path / "run", Config()) as journal:
        journal.record(0.0, RunStarted(replicas=4, relays=1), [])
        journal.record(1.0, HostJoined(2, (5, 6)), [])
    return tmp_path / "run"


def test_the_command_writes_what_the_controller_reads_once(run: Path) -> None:
    file = PriceFile(run)
    assert file.changed() == {}
    assert main(["price", str(run), "r3", "0.4"]) == 0
    assert main(["price", str(run), "h2", "1"]) == 0
    assert file.changed() == {"r3": 0.4, "h2": 1.0}
    assert file.changed() == {}


@pytest.mark.parametrize("words", [["t3", "1"], ["r", "1"], ["r3", "-1"], ["r3", "nan"], ["r3", "much"]])
def test_what_cannot_be_a_price_is_refused(run: Path, words: list[str]) -> None:
    assert main(["price", str(run), *words]) == 2
    assert not (run / FILE).exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("r77", "r77 is not in this run; its replicas are r0 to r6, 6 in all"),
        ("h1", "h1 is not in this run; its hosts are h0 to h2, 2 in all"),
    ],
)
def test_what_is_not_in_the_run_is_refused_by_name(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert main(["price", str(run), name, "1"]) == 2
    assert words in capsys.readouterr().err
    assert not (run / FILE).exists()


def test_a_file_that_somebody_spoilt_is_refused_in_a_sentence(run: Path) -> None:
    (run / FILE).write_text('{"r3": -1}')
    with pytest.raises(JournalError, match="delete it"):
        PriceFile(run).changed()
    with pytest.raises(JournalError, match="delete it"):
        set_price(run, "r3", 1.0)


def test_control_is_told_what_has_changed_and_a_replica_wins_over_its_host() -> None:
    drive = Drive(config(), replicas=4, relays=2).join_all()
    prices = {"h0": 1.0, "r2": 3.0, "r9": 5.0}
    told = list(price_changes(prices, drive.plane.state.fleet))
    assert told == [PriceChanged((0,), 1.0), PriceChanged((2,), 3.0)]
    for event in told:
        drive.tell(event)
    assert not list(price_changes(prices, drive.plane.state.fleet))


def test_what_is_spent_are_the_hours_at_work() -> None:
    spending = Spending()
    for replica in (0, 1):
        spending.see(0.0, ReplicaJoined(replica, 1, 0, -1, 1000, 8, price=2.0), [])
    spending.see(1800.0, PriceChanged((0,), 4.0), [Activate(1, 1, False, 0.0, 1.0, 1.0)])
    spending.see(3600.0, ReplicaJoined(0, 2, 0, -1, 1000, 8, price=2.0), [])
    spending.see(7200.0, PriceChanged((), 0.0), [GiveUp("replica", 0, 2, "it is silent")])
    spent = spending.total(9000.0)
    assert spent.dollars == pytest.approx(1 + 1 + 2 + 4)
    assert spent.dollars_of_all == pytest.approx(1 + 2 + 4 + 5)
    assert spent.sent_home == 1


@pytest.mark.parametrize(("given", "prices"), [("0.4", (0.4,)), ("0.4,1", (0.4, 1.0)), ("[0.4, 1]", (0.4, 1.0))])
def test_prices_are_given_as_a_shell_likes_them(given, prices):
    words = ["--model.preset", "qwen2.5-0.5b", "--rollout.prices", given]
    assert load([], words).rollout.prices == prices


def test_what_is_no_list_of_prices_is_told_what_one_is():
    with pytest.raises(ConfigError, match="wants a list of numbers of 0 or more"):
        load([], ["--rollout.prices", "cheap"])
