"""Hostile input: fuzzed messages and files against every decoder, damaged runs, names that point elsewhere.

The fuzzing itself is `benchmarks/fuzz.py`, which has a million inputs; here are some thousands of other ones.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config import Config, ConfigError, load
from tailrace.config.files import read_file, read_toml
from tailrace.envs.answers import last_between
from tailrace.envs.data import read_rows
from tailrace.envs.judge_wire import LONGEST, FrameError, Frames
from tailrace.launch.folder import run_folder
from tailrace.launch.models import export
from tailrace.protocol import RelayJoined, Request, TrajectoryMeta
from tailrace.store.journal import Journal, JournalError
from tailrace.store.run import RunStore
from tailrace.trainer.manifest import CheckpointError, TrainerState, check, described, found_in, read_state
from tailrace.trainer.sealed import sealed
from tailrace.types import MALFORMED

ROOT = Path(__file__).parents[2]
INPUTS = 30_000
SLOW = {"start weights", "checkpoint: safetensors"}  # they import torch, and have tests of their own


def fuzz() -> ModuleType:
    sys.path.append(str(ROOT / "benchmarks"))  # for what it imports
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "benchmarks" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("fuzz", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


FUZZ = fuzz()
DECODERS = [each for each in FUZZ.decoders() if each.name not in SLOW]


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda each: each.name)
def test_a_decoder_refuses_in_its_own_words_or_not_at_all(decoder) -> None:
    result = FUZZ.attack(decoder, max(100, round(INPUTS * decoder.share)), seed=1)
    assert (result.crashes, result.hangs, result.examples) == (0, 0, [])
    assert result.accepted + result.refused == result.inputs
    assert result.peak_mb < 500


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=30))
def test_no_json_value_breaks_the_journals_decoder(value) -> None:
    from tailrace.protocol import AnyEvent

    with pytest.raises(MALFORMED):
        msgspec.json.decode(json.dumps(value).encode(), type=AnyEvent)


# -------------------------------------------------------------------------------------------------------- damaged runs


@pytest.fixture
def config() -> Config:
    return load([], ["--model.preset", "qwen2.5-7b"])


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Path:
    """A run that was interrupted, with samples that the trainer may be told of."""
    with RunStore.create(tmp_path / "run", config) as store:
        for trajectory in range(40):
            store.trajectories.assign([Request(trajectory, 1, 0, 0, 3)])
            store.trajectories.finish(TrajectoryMeta(trajectory, 1, 64, 0, 0, "stop", 1.0))
            store.record(float(trajectory), RelayJoined(trajectory, 1), [])
        store.snapshot(20, b"older" * 50)
        store.snapshot(30, b"newer" * 50)
    return tmp_path / "run"


def resumed(run: Path) -> tuple[list[object], ...]:
    """Everything that a resumed run takes from its store."""
    with RunStore.reopen(run) as store:
        snapshot = store.newest_snapshot()
        entries = list(store.entries(0))
        return ([snapshot], [entry.event for entry in entries], [store.trajectories.results(range(40))])


def test_a_flipped_bit_is_found_or_changes_nothing(run: Path, config: Config) -> None:
    """Wherever it is: what is resumed is what was written, or nothing is."""
    before, whole, random = resumed(run), (run / "run.db").read_bytes(), Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        (run / "run.db").write_bytes(data)
        for rest in run.glob("run.db-*"):
            rest.unlink()
        try:
            after = resumed(run)
        except JournalError:
            refused += 1
            continue
        assert after[1:] == before[1:]
        assert after[0] == before[0] or after[0][0] is None or after[0][0].seq == 20  # type: ignore[attr-defined]
    assert refused > 50, "most of the file is data"


def test_a_damaged_snapshot_is_passed_over(run: Path) -> None:
    change(run, "UPDATE snapshots SET state = x'00' WHERE seq = 30")
    assert resumed(run)[0] == [(20, b"older" * 50)]
    change(run, "UPDATE snapshots SET crc = crc + 1")
    assert resumed(run)[0] == [None], "the journal has everything"


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE journal SET event = replace(event, ':7', ':8') WHERE seq = 8", "event 8 is missing or not as it was"),
        ("UPDATE journal SET now = now + 1 WHERE seq = 8", "event 8 is missing or not as it was"),
        ("UPDATE journal SET event = '{' WHERE seq = 8", "event 8 is missing or not as it was"),
        ("DELETE FROM journal WHERE seq = 8", "event 8 is missing or not as it was"),
        ("UPDATE trajectories SET reward = 0.5 WHERE id = 7", "how t7 ended is not as it was written"),
        ("DELETE FROM trajectories WHERE id = 7", "t7 is missing"),
        ("CREATE VIEW more AS SELECT * FROM journal", "'more' in it is more than a table"),
        ("CREATE TRIGGER t AFTER INSERT ON journal BEGIN DELETE FROM journal; END", "'t' in it is more than a table"),
        ("UPDATE meta SET value = x'ff' WHERE key = 'config'", "facts that are no text"),
    ],
)
def test_a_changed_run_is_not_resumed(run: Path, statement: str, sentence: str) -> None:
    change(run, statement)
    with pytest.raises(JournalError, match=sentence):
        resumed(run)


def test_a_view_that_never_ends_is_not_read(run: Path) -> None:
    change(run, "ALTER TABLE journal RENAME TO old")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS seq, 0.0 AS now FROM n"
    change(run, f"CREATE VIEW journal AS {endless}")
    with pytest.raises(JournalError, match="'journal' in it is more than a table"):
        list(Journal(run).entries())


def change(run: Path, statement: str) -> None:
    with closing(sqlite3.connect(run / "run.db")) as database, database:
        database.execute(statement)


def test_a_copy_of_a_run_in_use_is_whole_or_refused(tmp_path: Path, config: Config) -> None:
    """Copied file by file while it is written, as people do, with or without its log."""
    copies = 0
    with RunStore.create(tmp_path / "run", config) as store:
        for number in range(3000):
            store.record(float(number), RelayJoined(number, 1), [])
            store.trajectories.assign([Request(number, 1, 0, 0, 3)])
            if number % 10 == 0:
                store.commit()
            if number % 300 == 299:  # torn: the first half is older than the second
                copies += 1
                halves = [(tmp_path / "run" / "run.db").read_bytes()]
                copy = tmp_path / f"copy{copies}"
                copy.mkdir()
                for _ in range(40):
                    store.trajectories.assign([Request(10_000 + number, 1, 0, 0, 3)])
                    store.trajectories.fail(10_000 + number, 1, "x" * 4000)
                    store.commit()
                store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                halves.append((tmp_path / "run" / "run.db").read_bytes())
                cut = len(halves[0]) // 2
                (copy / "run.db").write_bytes(halves[0][:cut] + halves[1][cut:])
    for place in sorted(tmp_path.glob("copy*")):
        with suppress(JournalError), RunStore.reopen(place) as store:
            seen = [entry.event for entry in store.entries(0)]
            assert seen == [RelayJoined(number, 1) for number in range(len(seen))]


RESUME = ["train", str(ROOT / "examples" / "heavy_tail.toml"), "--resume", "--run.folder", ".", "--run.name", "run"]


@pytest.mark.parametrize("words", [["story", "run", "t0"], ["replay", "run"], ["export", "run", "--out", "x"], RESUME])
@pytest.mark.parametrize("damage", ["cut", "zeros", "text"])
def test_commands_say_in_one_sentence_what_is_wrong(run: Path, tmp_path: Path, words: list[str], damage: str) -> None:
    content = (run / "run.db").read_bytes()
    wrong: dict[str, Callable[[], bytes]] = {
        "cut": lambda: content[: len(content) // 2],
        "zeros": lambda: content[:4096] + bytes(len(content) - 4096),
        "text": lambda: b"not a database at all",
    }
    (run / "run.db").write_bytes(wrong[damage]())
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *words],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "run.db" in done.stderr


# ----------------------------------------------------------------------------------------------- damaged checkpoints


def checkpoint(folder: Path, step: int) -> Path:
    place = folder / f"step-{step:08d}"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    files = {file.name: described(file) for file in place.iterdir()}
    (place / "state.json").write_bytes(sealed(TrainerState(step, 100 * step, files=files)))
    return place


def changed(file: Path, old: bytes, new: bytes) -> None:
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new))


def test_the_state_of_an_earlier_release_has_no_checksum_and_is_read(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, 1)
    state = msgspec.structs.replace(read_state(place), layout=1, sum="")
    (place / "state.json").write_bytes(msgspec.json.encode(state))
    check(place)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has 25,599 of 25,600 bytes"),
        (lambda file: file.write_bytes(b"\1" + file.read_bytes()[1:]), "is not as it was written"),
        (lambda file: file.unlink(), "is missing"),
        (lambda file: (file.rename(file.with_name("x")), file.symlink_to("x")), "is missing"),
        (lambda file: (file.parent / "state.json").write_text("{"), "is not a checkpoint"),
        (lambda file: (file.parent / "state.json").unlink(), "is not a checkpoint"),
        (
            lambda file: changed(file.parent / "state.json", b'"updates":200', b'"updates":4'),
            "'state.json' is not as it",
        ),
        (lambda file: changed(file.parent / "state.json", b'"layout":2', b'"layout":1'), "'state.json' is not as it"),
        (lambda file: changed(file.parent / "state.json", b'"layout":2', b'"layout":3'), "written by a later release"),
        (lambda file: file.parent.rename(file.parent.with_name("step-00000003")), "of step 2 under another name"),
    ],
)
def test_a_damaged_checkpoint_is_never_the_newest(tmp_path: Path, damage, sentence: str, caplog) -> None:
    pytest.importorskip("torch")
    from tailrace.trainer.checkpoint import newest

    older, place = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    assert newest(tmp_path) == place
    damage(place / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        check(found_in(tmp_path)[-1])
    assert newest(tmp_path) == older
    assert sentence in caplog.text


# -------------------------------------------------------------------------------------------- nothing leaves its folder


def test_what_is_exported_is_what_lies_in_the_checkpoint(run: Path, tmp_path: Path) -> None:
    place = checkpoint(run / "checkpoints", 3)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (place / "more").symlink_to(secret)
    assert export(run, None, tmp_path / "out") == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert not list(tmp_path.glob(".out*"))
    (place / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="has 3 of 25,600 bytes"):
        export(run, 3, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_only_checkpoints_of_ours_are_looked_at(tmp_path: Path) -> None:
    for name in ("step-", "step-x", "step-00000001.old", "step--0000001", "step-٠٠٠٠٠٠٠١"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000002").write_text("a file")
    assert found_in(tmp_path) == []


def test_the_manifest_of_a_checkpoint_names_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for name in ("../secret", str(tmp_path / "secret"), "", ".", "a/../../secret", "x" * 5000, "a\0b"):
        place = tmp_path / "step-00000001"
        place.mkdir(exist_ok=True)
        state = TrainerState(1, 1, files={name: described(tmp_path / "secret")})
        (place / "state.json").write_bytes(sealed(state))
        with pytest.raises(CheckpointError, match="is damaged"):
            check(place)


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "a/b", "..", ".", "a\0b", "a\nb", "x" * 300, "a/", "./a", "é" * 150]
)
def test_a_run_lies_in_its_folder(name: str, config: Config) -> None:
    wrong = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))
    with pytest.raises(ConfigError, match=r"run\.name is"):
        run_folder(wrong, [])


@pytest.mark.parametrize("split", ["..", "../outside", "/etc", "", "a/b", "."])
def test_a_dataset_lies_in_its_folder(tmp_path: Path, split: str) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))
    with pytest.raises(ConfigError, match=r"not folders beside it|holds no dataset"):
        read_rows(tmp_path / "saved")


def test_the_shards_of_a_model_lie_in_its_folder(tmp_path: Path) -> None:
    from tailrace.model.load import model_folder

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"")
    index = tmp_path / "model.safetensors.index.json"
    for shard in ("../b.safetensors", "/etc/passwd", "sub/a.safetensors", 3):
        index.write_text(json.dumps({"weight_map": {"x": shard}}))
        with pytest.raises(ConfigError, match="not beside it"):
            model_folder(str(tmp_path))
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert model_folder(str(tmp_path)) == tmp_path
    (tmp_path / "a.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="has no weights"):
        model_folder(str(tmp_path))


# ---------------------------------------------------------------------------------------------------------- every bound


def test_settings_are_bounded_in_size_depth_and_number(tmp_path: Path) -> None:
    for content, sentence in {
        "x = 1\n" * 200_000: "has more than",
        "a" + ".a" * 3000 + " = 1": "more than 2,000 dots",
        "a" + ".a" * 900 + " = 1": "nested more than 16 tables deep",
        "a = " + "[" * 5000: "nested too deeply",
        "a = " + "9" * 5000: "4300 digits",
    }.items():
        (tmp_path / "run.toml").write_text(content)
        with pytest.raises(ConfigError, match=sentence):
            read_file(tmp_path / "run.toml")
    for number in range(30):
        (tmp_path / f"{number}.toml").write_text(f'extends = ["{number + 1}.toml", "{number + 1}.toml"]')
    (tmp_path / "30.toml").write_text("")
    with pytest.raises(ConfigError, match="extends more than 64 files"):
        read_file(tmp_path / "0.toml")
    assert read_toml('a = "' + "." * 1000 + '"')


def test_rows_are_bounded_in_size_and_depth(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "x", "deep": ' + "[" * 100 + "]" * 100 + "}")
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        read_rows(file)
    monkeypatch.setattr("tailrace.envs.data.LONGEST_LINE", 1000)
    file.write_text('{"prompt": "' + "x" * 2000 + '"}')
    with pytest.raises(ConfigError, match="line 1 has 1,000 bytes or more"):
        read_rows(file)


def test_a_frame_is_refused_before_it_has_come() -> None:
    with pytest.raises(FrameError, match="announced"):
        Frames().feed((LONGEST + 1).to_bytes(4, "little"))


def test_marks_of_a_policy_take_no_time() -> None:
    text = "<answer>" * 200_000
    assert last_between(text, "<answer>", "</answer>") is None
    assert last_between(text + "7</answer> </answer> <answer>", "<answer>", "</answer>") == "7"


# ------------------------------------------------------------------------------------------------ nothing is unpickled

BANNED = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "jsonpickle", "yaml"}


CALLS = {"torch.load", "np.load", "numpy.load", "eval", "__import__"}
ENDINGS = (".recv_pyobj", ".send_pyobj", "all_gather_object", "broadcast_object_list")
WORDS = {"allow_pickle", "trust_remote_code"}


def unpickles(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return bool({name.partition(".")[0] for name in names} & BANNED)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        return called in CALLS or called.endswith(ENDINGS) or bool({word.arg for word in node.keywords} & WORDS)
    return False


def test_nothing_is_unpickled() -> None:
    trees = {file: ast.parse(file.read_text()) for file in sorted((ROOT / "src").rglob("*.py"))}
    assert len(trees) > 100
    found = [(file, ast.unparse(node)) for file, tree in trees.items() for node in ast.walk(tree) if unpickles(node)]
    # a function that somebody passed to `tailrace.train`, in processes of their own
    assert {file.name for file, _ in found} == {"functions.py"}, found
    assert unpickles(ast.parse("import pickle").body[0])
    assert any(unpickles(node) for node in ast.walk(ast.parse("x = torch.load(file)")))


def test_models_load_without_pickles(tmp_path: Path) -> None:
    """A directory whose weights are a pickle is refused before it is opened."""
    from tailrace.model.load import model_folder

    (tmp_path / "config.json").write_text("{}")
    shutil.copy(__file__, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        model_folder(str(tmp_path))
