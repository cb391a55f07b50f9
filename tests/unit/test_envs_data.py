"""The user's rows: what is read, what is held out, and what is refused with which words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tailrace.config.errors import ConfigError
from tailrace.config.tree import TaskSettings
from tailrace.envs.data import read_rows, read_split

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "level": n} for n in range(5)]


def jsonl(path: Path, *lines: str | dict) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "data.parquet")
    saved = tmp_path / "saved" / "train"  # what `save_to_disk` writes for a dataset with splits
    saved.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with arrow.ipc.new_stream(str(saved / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    lines = jsonl(tmp_path / "data.jsonl", *ROWS, "")
    for path in (lines, tmp_path / "data.parquet", tmp_path / "saved", saved):
        assert read_rows(path) == ROWS, path


def test_the_answer_is_found_under_the_names_people_use(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "data.jsonl",
        {"prompt": "a", "ground_truth": 1},
        {"prompt": [{"role": "user", "content": "b"}], "reward_model": {"style": "rule", "ground_truth": "2"}},
        {"prompt": "c", "answer": 0, "ground_truth": 9},
    )
    assert [row["answer"] for row in read_rows(path, answers=True)] == [1, "2", 0]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": ', "line 2 is not valid JSON"),
        ('["a", "b"]', "line 2 is not an object"),
        ('{"question": "a", "answer": "b"}', "line 2 has no 'prompt'; it has question, answer"),
        ('{"prompt": null, "answer": "b"}', "line 2 has no 'prompt'"),
        ('{"prompt": "  ", "answer": "b"}', "line 2 has an empty prompt"),
        ('{"prompt": 7, "answer": "b"}', "line 2 has a prompt that is a number; write text or a list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "line 2 has a message without a role or text"),
        ('{"prompt": [], "answer": "b"}', "line 2 leaves nothing to answer"),
        ('{"prompt": [{"role": "assistant", "content": "a"}], "answer": "b"}', "line 2 leaves nothing to answer"),
        ('{"prompt": "a"}', "line 2 has no answer"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    path = jsonl(tmp_path / "data.jsonl", ROWS[0], line)
    with pytest.raises(ConfigError) as refusal:
        read_rows(path, answers=True)
    assert str(refusal.value).startswith(f"{path}, ")
    assert sentence in str(refusal.value)


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["easy", "hard"]}')
    for name, sentence in {
        "nowhere.jsonl": "does not exist; task.data is a JSONL",
        "empty.jsonl": "has no rows",
        "broken.parquet": "broken.parquet cannot be read",
        "bare": "holds no dataset",
        "splits": f"has the splits easy, hard; name one of them, for example {tmp_path}/splits/easy",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            read_rows(tmp_path / name)


def test_without_pyarrow_parquet_is_refused_with_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"needs the package pyarrow; run pip install 'tailrace\[parquet\]'"):
        read_rows(tmp_path / "data.parquet")


def test_held_out_rows_are_the_last_or_those_of_another_file(tmp_path: Path) -> None:
    data = str(jsonl(tmp_path / "data.jsonl", *ROWS))
    split = read_split(TaskSettings(data=data, eval_rows=2), answers=True)
    assert (split.train, split.held_out) == (ROWS[:3], ROWS[3:])
    other = read_split(TaskSettings(data=data, eval_data=str(jsonl(tmp_path / "eval.jsonl", ROWS[0]))), answers=True)
    assert (other.train, other.held_out) == (ROWS, ROWS[:1])
    assert len(read_split(TaskSettings(data=data), answers=True).held_out) == 1
    with pytest.raises(ConfigError, match=r"has 5 rows and task.eval_rows holds out 5 of them"):
        read_split(TaskSettings(data=data, eval_rows=5), answers=True)
