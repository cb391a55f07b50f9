"""Who gets which card of a machine, how much of it, and the sentence for every deal that cannot work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tailrace.cli import main
from tailrace.config import Config, ConfigError, dealing, load
from tailrace.config.check import check
from tailrace.config.dealing import Deal, deal_elsewhere, deal_here, ranks_share_cards, resolved, visible
from tailrace.config.tree import Local, Model, Rollout, Trainer
from tailrace.launch import cards as launch_cards
from tailrace.launch import machines
from tailrace.launch.cards import deal_cards, dealt_among, imagined, record_cards
from tailrace.launch.deal_table import describe_deal
from tailrace.model import device
from tailrace.model.device import Survey
from tailrace.model.numa import cpu_numbers, numa_of
from tailrace.runtime import agent
from tailrace.runtime.local import LocalProcesses, placed
from tailrace.store.folder import RunFolder
from tailrace.store.run import RunStore
from tailrace.types import Card, CardShare
from tailrace.wire.keys import JoinKey
from tailrace.wire.messages import ComponentSpec, Wanted

GB = 10**9
SMALL = Model(parameters=10**9, layers=2, hidden=8, heads=2)
DEADLINE_S = 60.0
MAX_CARDS, MAX_RANKS, MAX_REPLICAS = 5, 4, 7


def of(count: int, memory: float = 80) -> tuple[Card, ...]:
    return tuple(
        [Card("card", int(memory * GB), (9, 0), n // 4, f"{n // 4 * 8}-{n // 4 * 8 + 7}") for n in range(count)]
    )


def config(replicas: int | str = "auto", ranks: int = 1, **more: object) -> Config:
    """`trainer_cards=(0, 1)`, `rollout_memory=0.5`, and so on."""
    given = {name.partition("_"): value for name, value in more.items()}
    rollout = {key[2]: value for key, value in given.items() if key[0] == "rollout"}
    trainer = {key[2]: value for key, value in given.items() if key[0] == "trainer"}
    return Config(
        local=msgspec.convert({"replicas": replicas}, Local),
        rollout=msgspec.convert(rollout, Rollout),
        trainer=msgspec.convert({"ranks": ranks, **trainer}, Trainer),
    )


def dealt(count: int, *args: Any, **more: object) -> tuple[list[tuple[int, ...]], list[int]]:
    """The cards of the replicas, and of the ranks."""
    deal = deal_here(resolved(config(*args, **more), count), of(count))
    return [one.cards for one in deal.replicas], [one.cards[0] for one in deal.ranks]


def singles(*cards: int) -> list[tuple[int, ...]]:
    return [(card,) for card in cards]


# ------------------------------------------------------------------------------------------------------ who gets which


@pytest.mark.parametrize(
    ("cards", "replicas", "ranks", "expected"),
    [
        (1, "auto", 1, (singles(0), [0])),  # shared
        (2, "auto", 1, (singles(1), [0])),
        (8, "auto", 1, (singles(1, 2, 3, 4, 5, 6, 7), [0])),
        (8, "auto", 4, (singles(4, 5, 6, 7), [0, 1, 2, 3])),
        (2, "auto", 2, (singles(0, 1), [0, 1])),  # the trainer leaves none: all are shared
        (2, 3, 1, (singles(1, 1, 1), [0])),
        (3, 3, 1, (singles(1, 2, 1), [0])),
        (4, 1, 1, (singles(1), [0])),
    ],
)
def test_ranks_take_the_first_cards_and_replicas_the_others_in_turn(cards, replicas, ranks, expected):
    assert dealt(cards, replicas, ranks) == expected


def test_cards_by_list():
    assert dealt(4, rollout_cards=(3, 1), trainer_cards=(2,)) == (singles(3, 1), [2])
    assert dealt(4, 5, rollout_cards=(3, 1)) == (singles(3, 1, 3, 1, 3), [0])
    assert dealt(1, "auto", 2, trainer_cards=(0, 0)) == (singles(0), [0, 0])
    assert dealt(4, rollout_device="cuda:2", trainer_device="cuda:2") == (singles(2), [2])


def test_what_does_not_compute_on_gpus_gets_none():
    assert dealt(3, 3, trainer_device="cpu") == (singles(0, 1, 2), [])
    assert dealt(3, "auto", trainer_device="cpu")[0] == singles(0, 1, 2)
    assert dealt(2, rollout_device="cpu") == ([], [0])
    assert resolved(config(rollout_device="cpu"), 2).local.replicas == 2
    emulated = config(2, rollout_engine="emulated", trainer_engine="emulated")
    assert deal_here(emulated, of(8)) == Deal()
    assert deal_here(resolved(config(), 0), ()) == Deal()
    assert resolved(config(), 0).local.replicas == 2


def test_a_replica_of_several_cards_gets_whole_sets_of_them(monkeypatch):
    monkeypatch.setattr(dealing, "cards_per_replica", lambda _: 2)
    assert dealt(8, "auto", 2) == ([(2, 3), (4, 5), (6, 7)], [0, 1])
    assert dealt(8, "auto", 1)[0] == [(1, 2), (3, 4), (5, 6)]  # 7 is left over
    assert dealt(4, "auto", 4)[0] == [(0, 1), (2, 3)]
    assert dealt(4, 3, 1, rollout_cards=(3, 2, 0, 1))[0] == [(3, 2), (0, 1), (3, 2)]


# ------------------------------------------------------------------------------------------------------------ of memory


@pytest.mark.parametrize(
    ("cards", "args", "more", "shares"),
    [
        (1, ("auto",), {}, ([0.3], [0.7])),
        (1, (2,), {}, ([0.15, 0.15], [0.7])),
        (1, (1,), {"rollout_memory": 0.5}, ([0.5], [0.5])),
        (2, ("auto",), {}, ([0.85], [1.0])),
        (2, (2,), {}, ([0.425, 0.425], [1.0])),
        (1, (1,), {"trainer_device": "cpu"}, ([0.85], [])),
        (1, (2, 2), {"trainer_cards": (0, 0)}, ([0.15, 0.15], [0.35, 0.35])),
        (2, (1, 2), {"trainer_cards": (0, 0)}, ([0.85], [0.5, 0.5])),
        (2, (1,), {"rollout_memory": 1.0}, ([1.0], [1.0])),  # nobody else is there
    ],
)
def test_shares_of_a_card(cards, args, more, shares):
    deal = deal_here(resolved(config(*args, **more), cards), of(cards))
    assert [one.memory for one in deal.replicas] == pytest.approx(shares[0])
    assert [one.memory for one in deal.ranks] == pytest.approx(shares[1])


def test_the_shares_of_every_card_add_up_to_at_most_one():
    for count in range(1, MAX_CARDS + 1):
        for ranks in range(1, min(MAX_RANKS, count) + 1):
            for replicas in range(1, MAX_REPLICAS + 1):
                deal = deal_here(config(replicas, ranks), of(count))
                used = Counter[int]()
                for one in (*deal.replicas, *deal.ranks):
                    used.update(dict.fromkeys(one.cards, one.memory))
                assert max(used.values()) <= 1 + 1e-9, (count, ranks, replicas)
                assert len(deal.replicas) == replicas


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("cards", "args", "more", "words"),
    [
        (2, (1, 3), {}, r"only 2 GPUs here.*write 2, or .*trainer.cards = \[0, 1, 0\]"),
        (1, (1, 2), {}, r"is only 1 GPU here"),
        (2, (1,), {"rollout_cards": (0, 2)}, "rollout.cards names card 2, .*cards 0 to 1"),
        (1, (1,), {"trainer_cards": (4,)}, "trainer.cards names card 4, .*only card 0"),
        (4, (1, 3), {"trainer_cards": (0, 1)}, r"2 cards for 3 ranks .*such as \[0, 1, 2\]"),
        (2, (1,), {"trainer_device": "cuda:2"}, r'the last GPU here is "cuda:1"'),
        (0, (1,), {"rollout_cards": (0,)}, r"rollout.cards is \[0\], but there is no GPU"),
        (1, (1,), {"rollout_memory": 1.0}, "leaves the trainer nothing of card 0; write less"),
    ],
)
def test_a_deal_that_cannot_work_is_refused_with_one_that_would(cards, args, more, words):
    with pytest.raises(ConfigError, match=words):
        deal_here(config(*args, **more), of(cards))


@pytest.mark.parametrize(
    ("cards", "more", "words"),
    [
        (1, {}, "takes 2 cards, but there is only 1 here"),
        (2, {}, r"the trainer leaves only 1 of 2; .*rollout.cards = \[0, 1\]"),
        (4, {"rollout_cards": (1,)}, "but a replica takes 2 cards"),
        (4, {"rollout_cards": (1, 2, 3)}, r"no multiple of the 2 .*write \[1, 2\]"),
        (4, {"rollout_cards": (1, 1)}, r"cards \[1, 1\], the same one twice"),
    ],
)
def test_sets_of_cards_that_no_replica_can_have(monkeypatch, cards, more, words):
    monkeypatch.setattr(dealing, "cards_per_replica", lambda _: 2)
    with pytest.raises(ConfigError, match=words):
        deal_here(config(1, **more), of(cards))


@pytest.mark.parametrize(
    ("cards", "gigabytes", "args", "more", "words"),
    [
        (4, 10, (3, 1), {}, r"the trainer has 10.0 GB \(100 % of card 0\).* take 16.0 GB; write trainer.ranks = 2"),
        (1, 10, (1, 1), {}, "trainer.ranks = 2, on as many cards, of which 1 are here"),
        (1, 20, (1, 1), {}, r"14.0 GB \(70 % .*lower rollout.memory"),
        (2, 20, (9, 1), {}, r"replica 0 has 1.9 GB .*take 2.0 GB; write fewer replicas .*at most 8 on a card"),
        (2, 20, (2, 1), {"rollout_memory": 0.05}, r"write rollout.memory = 0.2,"),
        (2, 20, (4, 1), {"rollout_precision": "float32", "rollout_memory": 0.15}, r"write rollout.memory = 0.8,"),
    ],
)
def test_what_cannot_lie_in_its_share_is_refused(cards, gigabytes, args, more, words):
    with pytest.raises(ConfigError, match=words):
        deal_here(replace(config(*args, **more), model=SMALL), of(cards, gigabytes))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rollout_cards": (0,), "rollout_device": "cpu"}, r'rollout.device is "cpu"; write "cuda"'),
        ({"trainer_cards": (0,), "trainer_device": "cuda:1"}, r'trainer.device is "cuda:1"; write "cuda"'),
        (
            {"rollout_cards": (0,), "rollout_engine": "emulated", "trainer_engine": "emulated"},
            "emulated.*leave rollout.cards out",
        ),
    ],
)
def test_numbers_of_cards_that_contradict_the_device(more, words):
    with pytest.raises(ConfigError, match=words):
        check(replace(config(1, **more), model=SMALL))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--rollout.cards", "[0, 2]"), (0, 2)),
        (("--rollout.cards", "0,2"), (0, 2)),
        (("--rollout.cards=3",), (3,)),
    ],
)
def test_lists_of_numbers_on_the_command_line(words, expected):
    assert load([], ["--model.preset", "qwen2.5-7b", *words]).rollout.cards == expected


@pytest.mark.parametrize("value", ["-1", "[0.5]", "one", "[0, true]"])
def test_what_is_no_list_of_cards(value):
    with pytest.raises(ConfigError, match=r"rollout.cards .*a list of whole numbers of 0 or more, such as \[0, 1\]"):
        load([], ["--model.preset", "qwen2.5-7b", f"--rollout.cards={value}"])


# -------------------------------------------------------------------------------------------------- what processes see


@pytest.mark.parametrize(
    ("cards", "given", "expected"),
    [
        ((), "4,5", None),
        ((1,), None, "1"),
        ((1,), "4,5", "5"),
        ((2, 0), "4, 5 ,6", "6,4"),
        ((1,), "GPU-aa,GPU-bb", "GPU-bb"),
        ((0,), "MIG-GPU-aa/1/0", "MIG-GPU-aa/1/0"),
    ],
)
def test_a_process_sees_its_cards_by_the_names_that_its_parent_was_given(cards, given, expected):
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible(cards, environment).get("CUDA_VISIBLE_DEVICES") == expected


def test_a_component_is_told_what_it_was_dealt_and_calls_its_card_the_first():
    deal = deal_here(config(2, 1, rollout_device="cuda:1", trainer_device="cuda:0"), of(2))
    spec = ComponentSpec("replica", 5, 1, "", "", "", config(2, rollout_device="cuda:1"))
    told = placed(spec, deal)
    assert (told.cards, told.memory, told.cpus) == ((1,), 0.425, "0-7")
    assert told.config.rollout.device == "cuda"
    assert placed(replace(spec, role="relay"), deal).cards == ()
    assert placed(spec, Deal()) == spec


def test_neighbouring_numbers_are_dealt_apart_wherever_they_begin():
    deal = deal_elsewhere(config(2), of(4), 4)
    for first in (0, 3, 17):
        assert sorted(deal.of("replica", first + n).cards[0] for n in range(4)) == [0, 1, 2, 3]
    assert deal.of("trainer", 0) == CardShare()


def test_numbers_of_cards_are_those_of_the_runs_own_machine():
    there = config(2, rollout_cards=(7,), trainer_cards=(6,))
    deal = deal_elsewhere(there, of(2), 2)
    assert [one.cards for one in deal.replicas] == singles(0, 1)
    assert deal_elsewhere(config(2, rollout_device="cuda:3"), of(2), 2) == deal
    assert deal_elsewhere(there, (), 2) == Deal()


def test_ranks_that_share_a_card_are_known_as_such():
    assert ranks_share_cards(config(1, 2, trainer_cards=(1, 1)))
    assert not ranks_share_cards(config(1, 2, trainer_cards=(1, 0)))
    assert not ranks_share_cards(config(1, 2))


def test_the_cpus_near_a_card(tmp_path):
    folder = tmp_path / "0000:17:00.0"
    folder.mkdir()
    assert numa_of("0000:17:00.0", tmp_path) == (-1, "")
    (folder / "numa_node").write_text("1\n")
    (folder / "local_cpulist").write_text("2-3,8\n")
    assert numa_of("0000:17:00.0", tmp_path) == (1, "2-3,8")
    assert numa_of("", tmp_path) == (-1, "")
    assert cpu_numbers("2-3,8") == {2, 3, 8}
    assert cpu_numbers("") == set()


def test_a_component_stays_on_the_cpus_that_it_is_granted_near_its_card():
    code = "import os; from tailrace.model.numa import stay_near; stay_near('{}'); print(*os.sched_getaffinity(0))"

    def stays(cpus: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code.format(cpus)], capture_output=True, text=True, check=True
        ).stdout

    anywhere = stays("")
    first = anywhere.split()[0]
    assert stays(f"{first},4000-4003").split() == [first]
    assert stays("4000-4003") == anywhere


async def started(deal: Deal, folder: Path) -> tuple[dict[str, str], set[int]]:
    """What the second trainer rank of a run has for an environment, and the CPUs that it comes to stay on."""
    emulated = config(1, 2, rollout_engine="emulated", trainer_engine="emulated")
    lifeline, held = os.pipe()
    local = LocalProcesses(RunFolder(folder), 0, lambda *_: None, deal)
    nowhere = ComponentSpec("trainer", 0, 1, "tcp://127.0.0.1:9", "ab" * 32, str(folder), emulated, lifeline=lifeline)
    process = local.start(nowhere, [replace(nowhere, rank=rank) for rank in range(2)])
    child = process.children[1].pid
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (
                b"starts as" not in process.log.read_bytes() or len(os.sched_getaffinity(process.children[1].pid)) > 1
            ):
                await asyncio.sleep(0.02)
        lines = Path(f"/proc/{child}/environ").read_text().split("\0")
        return dict(line.split("=", 1) for line in lines if line), os.sched_getaffinity(child)
    finally:
        await local.end([process], 0.0)
        os.close(held)
        os.close(lifeline)


def test_a_process_sees_its_own_card_alone_and_stays_near_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb,GPU-cc")
    cpu = max(os.sched_getaffinity(0))
    deal = Deal(ranks=(CardShare((0,), 1.0, str(cpu)), CardShare((2,), 1.0, str(cpu))))
    environment, cpus = asyncio.run(started(deal, tmp_path))
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-cc"
    assert cpus == {cpu}


# ------------------------------------------------------------------------------------------------- before a run starts


def found(monkeypatch: pytest.MonkeyPatch, cards: tuple[Card, ...]) -> None:
    monkeypatch.setattr(device, "has_device_files", lambda: True)
    monkeypatch.setattr(device, "survey_apart", lambda: Survey("2.13", "13.0", ("sm_90",), cards, triton=True))


def test_auto_becomes_the_number_that_a_run_is_begun_with_and_stays_with(monkeypatch, tmp_path):
    auto = replace(config(), model=SMALL)
    found(monkeypatch, of(4))
    dealt = deal_cards(auto, tmp_path, resume=False, begun=False)
    assert (dealt.config.local.replicas, dealt.cards) == (3, of(4))
    with RunStore.create(tmp_path, dealt.config) as store:
        record_cards(store.meta, dealt.cards)
        store.commit()
    found(monkeypatch, of(2))
    resumed = deal_cards(auto, tmp_path, resume=True, begun=False)
    assert [one.cards for one in resumed.deal.replicas] == singles(1, 1, 1)
    taken_over = deal_cards(auto, tmp_path, resume=False, begun=True)
    assert taken_over.deal == dealt.deal


def test_a_controller_that_takes_over_asks_nobody(monkeypatch, tmp_path):
    def ask() -> None:
        raise AssertionError("nobody had to be asked")

    with RunStore.create(tmp_path, replace(config(2), model=SMALL)):
        monkeypatch.setattr(launch_cards, "survey_for", ask)
        assert deal_cards(config(2), tmp_path, resume=False, begun=True).deal == Deal()


def test_cards_that_nobody_gets_are_worth_a_note():
    assert dealt_among(config(), of(4)).notes == ()
    assert "GPUs 2, 3 have nothing to do" in dealt_among(config(1), of(4)).notes[0]
    assert "GPU 2 has nothing to do" in dealt_among(config(1), of(3)).notes[0]


# ----------------------------------------------------------------------------------------------------------- the doctor


def test_cards_that_are_not_here():
    assert [card.memory >> 30 for card in imagined("2x80, 1x24.5")] == [80, 80, 24]
    for text in ("8", "8x", "x80", "0x80", "8x0", "8x80x", "-1x80", "", "9999x80", "8 x 80"):
        with pytest.raises(ValueError, match="such as 8x80"):
            imagined(text)


def test_the_table_has_every_process_and_every_card():
    lines = describe_deal(dealt_among(config(3), of(8))).splitlines()
    assert lines[2].split()[:3] == ["trainer", "0", "card"]
    assert lines[3].split("  ")[-1] == "0-7 (NUMA node 0)"
    assert [line.split()[:2] for line in lines if "nobody" in line] == [["nobody", str(n)] for n in (4, 5, 6, 7)]
    assert [line.split()[1] for line in lines if "replica" in line and "GiB" in line] == ["0", "1", "2"]
    on_cpu = describe_deal(dealt_among(config(3, trainer_device="cpu"), of(2)))
    assert "trainer         the CPU" in on_cpu


def test_the_doctor_prints_the_deal_or_refuses_it(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "package:mine"\npreset = "qwen2.5-7b"\n[task]\ndata = "questions.jsonl"\n')
    assert main(["doctor", str(file), "--cards", "4x141"]) == 0
    assert "replica 2  3    GPU of 141 GB   85 %" in capsys.readouterr().out
    assert main(["doctor", str(file), "--cards", "4x80"]) == 2
    assert "write trainer.ranks = 2" in capsys.readouterr().err
    assert main(["doctor", str(file), "--cards", "4x80", "--trainer.ranks", "2", "--local.replicas", "auto"]) == 0
    assert main(["doctor", "--cards", "eight"]) == 2
    assert main(["doctor", "--cards", "8x80"]) == 0


@pytest.mark.skipif(device.has_device_files(), reason="there is a GPU here")
def test_without_a_gpu_the_doctor_says_so(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "package:mine"\n')
    assert main(["doctor", str(file)]) == 0
    said = capsys.readouterr().out
    assert "none here: replicas and trainer compute on the CPU" in said
    assert "2 replicas, 1 relay and a trainer" in said
    assert main(["doctor", str(file), "--rollout.cards", "0"]) == 2


def test_a_machine_that_has_joined_deals_its_own_cards(monkeypatch):
    monkeypatch.setattr(agent, "check_join_key", lambda *_: None)
    began: list[ComponentSpec] = []
    key = JoinKey("", "ab" * 32)
    machine = agent.Agent("tcp://127.0.0.1:9", key, agent.Room(2, cards=of(2, 20)), lambda _: None)
    monkeypatch.setattr(machine._local, "start", lambda spec: began.append(placed(spec, machine._local.deal)))
    run = replace(config(5, rollout_cards=(7,)), model=replace(SMALL, path=""))
    specs = tuple([ComponentSpec("replica", id, 1, "", "", "", run, key="ab") for id in (5, 6)])
    machine._obey(Wanted(tuple([spec.name for spec in specs]), specs))
    assert sorted(spec.cards for spec in began) == singles(0, 1)
    large = replace(specs[0], incarnation=2, config=replace(run, model=replace(SMALL, parameters=10**11)))
    with pytest.raises(ConfigError, match=r"replica 0 has 17\.0 GB .*smaller model"):
        machine._obey(Wanted((large.name,), (large,)))


def test_a_worker_counts_its_cards(monkeypatch):
    asked: list[object] = []

    async def work(endpoint: str, key: object, room: agent.Room) -> machines.Attendance:
        asked.append((room.replicas, len(room.cards)))
        return machines.Attendance(0, resumable=False)

    monkeypatch.setattr(machines, "_work", work)
    monkeypatch.setenv("TAILRACE_JOIN_KEY", "")
    monkeypatch.setattr(machines, "_key_reader", lambda _: lambda: JoinKey("", "ab" * 32))
    auto = ("--replicas", "auto")
    for cards, words in ((3, auto), (0, auto), (3, ()), (1, ("--replicas", "2")), (4, (*auto, "--ranks", "3"))):
        monkeypatch.setattr(machines, "cards_of_worker", lambda cards=cards: of(cards))
        assert main(["worker", "--join", "127.0.0.1:4700", *words]) == 0
    assert asked == [(3, 3), (1, 0), (1, 3), (2, 1), (1, 4)]
    assert main(["worker", "--join", "127.0.0.1:4700", "--replicas", "all"]) == 2
