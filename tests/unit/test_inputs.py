"""A run goes on with the inputs that it was begun with, or with others that somebody has accepted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace import __version__
from tailrace.config import Config, load
from tailrace.config.errors import ConfigError
from tailrace.envs import inputs
from tailrace.envs.inputs import Pins, changes, pinned, refuse_changed
from tailrace.envs.sources import Later
from tailrace.launch.folder import begin_store, resume_store
from tailrace.launch.models import export
from tailrace.store.journal import Journal, JournalError
from tailrace.store.run import RunStore

START = Path(__file__).parents[2] / "examples" / "running_total" / "start"
REWARD = """
import json, numpy, helper
from package.inner import deep
def judge(completion, answer):
    import late
    return 1.0
"""
ROW = '{"prompt": "a 1 =", "answer": "1"}\n'
FILES = {
    "rows.jsonl": ROW * 3,
    "held_out.jsonl": ROW,
    "rewards.py": REWARD,
    "helper.py": "from package import second",
    "late.py": "import helper",
    "package/__init__.py": "",
    "package/inner.py": "from . import second\ndeep = 1",
    "package/second.py": "",
    "model/chat_template.jinja": "{{ messages }}",
    "model/templates/tool.jinja": "{{ tools }}",
}
BESIDE = {"unused.py": "", "json.py": "", "notes.txt": "", "model/README.md": "", "model/optimizer.bin": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(START, tmp_path / "model")
    for name, text in (FILES | BESIDE).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def settings(folder: Path, *more: str) -> Config:
    own = {"model.path": "model", "task.data": "rows.jsonl", "task.eval_data": "held_out.jsonl"}
    words = [word for key, name in own.items() for word in (f"--{key}", str(folder / name))]
    return load([], [*words, "--task.reward", f"{folder / 'rewards.py'}:judge", *more])


def names(folder: Path, pins: Pins) -> set[str]:
    return {str(Path(name).relative_to(folder)) for name in pins}


def test_every_file_that_a_run_reads_is_pinned(folder: Path) -> None:
    model = {f"model/{file.name}" for file in START.iterdir() if file.suffix in (".json", ".safetensors")}
    assert len(model) >= 4
    assert names(folder, pinned(settings(folder))) == {*FILES, *model}


def appended(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def flipped(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("change", [appended, flipped])
@pytest.mark.parametrize("name", [*filter(FILES.get, FILES), "model/tokenizer.json", "model/model.safetensors"])
def test_a_changed_file_is_named(folder: Path, name: str, change: Callable[[Path], None]) -> None:
    before = pinned(settings(folder))
    refuse_changed(before, pinned(settings(folder)))
    change(folder / name)
    with pytest.raises(ConfigError, match=rf"^{folder / name} has changed .* since the run was begun; .* by --accept"):
        refuse_changed(before, pinned(settings(folder)))


def test_a_module_that_comes_or_goes_is_named(folder: Path) -> None:
    before = pinned(settings(folder))
    (folder / "helper.py").write_text("import unused")
    assert changes(before, pinned(settings(folder)))[1:] == [f"{folder / 'unused.py'} is read now, and was not"]
    (folder / "package" / "second.py").unlink()
    assert f"{folder / 'package' / 'second.py'} is not read any more" in changes(before, pinned(settings(folder)))


def test_a_class_and_a_module_are_pinned_by_their_files(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(folder)
    model = ["--model.path", str(folder / "model")]
    for name in (f"{folder / 'late.py'}:Maze", "late:Maze", "package.inner:Maze"):
        found = names(folder, pinned(load([], [*model, "--task.name", name])))
        assert {each for each in found if each.endswith(".py")} == {
            *(["package/inner.py"] if name.startswith("package") else ["late.py", "helper.py"]),
            "package/__init__.py",
            "package/second.py",
        }


def test_the_files_of_a_dataset_are_pinned(folder: Path) -> None:
    data = folder / "saved"
    (data / "train").mkdir(parents=True)
    (data / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("a.arrow", "b.arrow"):
        (data / "train" / name).write_bytes(b"rows")
    before = pinned(settings(folder, "--task.data", str(data)))
    flipped(data / "train" / "b.arrow")
    (found,) = changes(before, pinned(settings(folder, "--task.data", str(data))))
    assert found == f"{data / 'train' / 'b.arrow'} has changed (it is as long as it was, but not the same)"


def test_large_weights_are_pinned_by_header_size_and_blocks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(inputs, "SMALL", 1000)
    monkeypatch.setattr(inputs, "HEADER", 1000)
    monkeypatch.setattr(inputs, "BLOCKS", 16)
    file, size = tmp_path / "model.gguf", 1 << 20
    whole = bytes(range(256)) * (size // 256)
    file.write_bytes(whole)
    config = load([], ["--model.preset", "smollm2-135m"])
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(file)))
    before = pinned(config)
    assert before[str(file)].digest.startswith("sampled ")
    for place in (0, 999, 1000, size - 1):
        file.write_bytes(whole[:place] + b"!" + whole[place + 1 :])
        assert changes(before, pinned(config)), f"byte {place}"
    file.write_bytes(whole[:-256])
    assert changes(before, pinned(config))
    file.write_bytes(whole)
    assert not changes(before, pinned(config))


# ------------------------------------------------------------------------------------------------------------ resuming


def begin(folder: Path, config: Config) -> Path:
    run = folder / "run"
    begin_store(run, config).close(complete=False)
    return run


def resume(run: Path, config: Config, accept: bool = False) -> None:
    resume_store(run, config, accept).close(complete=False)


def test_a_run_with_other_inputs_is_refused_until_somebody_accepts_them(folder: Path, caplog: Any) -> None:
    config = settings(folder)
    run = begin(folder, config)
    resume(run, config)
    appended(folder / "rows.jsonl")
    for steps in ("10", "20"):
        with pytest.raises(ConfigError, match=r"rows.jsonl has changed \(it had 105 bytes and has 106\) since"):
            resume(run, settings(folder, "--run.steps", steps))
    assert Journal(run).config == config, "what is refused changes nothing"
    resume(run, config, accept=True)
    assert "goes on with changed inputs: " in caplog.text
    resume(run, config)
    meta = Journal(run).meta
    assert inputs.recorded(meta) == pinned(config)
    (accepted,) = msgspec.json.decode(meta[inputs.ACCEPTED], type=list[inputs.Acceptance])
    assert accepted.changes == [f"{folder / 'rows.jsonl'} has changed (it had 105 bytes and has 106)"]


def test_a_run_of_an_earlier_release_is_pinned_when_it_resumes(folder: Path) -> None:
    config = settings(folder)
    RunStore.create(folder / "run", config).close(complete=False)
    assert inputs.recorded(Journal(folder / "run").meta) is None
    resume(folder / "run", config)
    assert inputs.recorded(Journal(folder / "run").meta) == pinned(config)


def test_a_controller_that_takes_over_reads_no_other_prompts(folder: Path) -> None:
    config = settings(folder)
    source = Later(config, pinned(config))
    appended(folder / "rows.jsonl")
    with pytest.raises(ConfigError, match="has changed"):
        source.rows(0, 1)


def test_what_a_run_started_from_is_not_handed_out_once_it_is_another_model(folder: Path) -> None:
    run = begin(folder, settings(folder))
    appended(folder / "rows.jsonl")
    assert export(run, 0, folder / "out") == 0
    flipped(folder / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.safetensors has changed .* not what the run started from"):
        export(run, 0, folder / "other")
    assert not (folder / "other").exists()


def written_by(run: Path, key: str, value: str) -> None:
    with RunStore.reopen(run) as store:
        store.meta.set(key, value)


def test_another_release_that_goes_on_says_so_once(folder: Path, caplog: Any) -> None:
    config = settings(folder)
    run = begin(folder, config)
    written_by(run, "tailrace", "0.0.7")
    resume(run, config)
    resume(run, config)
    (told,) = caplog.messages
    assert told.endswith(f"written by tailrace 0.0.7 until now, and goes on with tailrace {__version__}")
    assert Journal(run).meta["releases"] == f"0.0.7 from event 1, {__version__} from event 1"


def test_another_format_is_refused(folder: Path) -> None:
    config = settings(folder)
    run = begin(folder, config)
    written_by(run, "tailrace", "9.0.0")
    written_by(run, "format", "9")
    with pytest.raises(
        JournalError, match=f"written by tailrace 9.0.0 in journal format 9; tailrace {__version__} reads"
    ):
        resume(run, config)
