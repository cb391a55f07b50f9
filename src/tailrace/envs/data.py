"""Rows of the user's own data: JSONL or parquet files and saved Hugging Face datasets, checked row by row.

Read by `tasks.OwnTask`, in the controller only. A row comes out with `prompt` (text or messages), `answer` where it has
one, and every other column as it was. What cannot be used is refused with the file and the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config, TaskSettings
from tailrace.envs.rewards import needs_answer
from tailrace.types import MALFORMED

HELD_OUT = 256  # rows, where nobody says how many
FEW = 5  # but no more than one in so many
LONGEST_LINE = 64 << 20  # bytes of a JSONL row; a prompt of a million tokens has a tenth of that
DEEPEST = 32  # lists and objects within each other: a row is copied, stored and sent, and each takes stack for it
MOST_BYTES = 64 << 30  # of a parquet file once it is unpacked; a small file may claim anything

Columns = dict[str, Any]


class Split(NamedTuple):
    """What is trained on, and what is only measured."""

    train: list[Columns]
    held_out: list[Columns]


def read_split(task: TaskSettings, answers: bool) -> Split:
    """The rows of a task's settings. `answers`: the reward compares with an answer, so every row must have one."""
    rows = read_rows(Path(task.data), answers)
    if task.eval_data:
        return Split(rows, read_rows(Path(task.eval_data), answers, "task.eval_data"))
    held_out = min(HELD_OUT, len(rows) // FEW) if task.eval_rows is None else task.eval_rows
    if held_out >= len(rows):
        raise ConfigError(
            f"{task.data} has {len(rows)} rows and task.eval_rows holds out {held_out} of them, so none are left "
            f"to train on; write a smaller task.eval_rows, or other data as task.eval_data"
        )
    cut = len(rows) - held_out
    return Split(rows[:cut], rows[cut:])


def eval_rows(config: Config) -> dict[str, list[Columns]]:
    """The rows of `[eval.sets]`, by name."""
    if config.eval.sets and config.task.name and ":" not in config.task.name:
        raise ConfigError(f"eval.sets is for data of your own; the task '{config.task.name}' holds out rows itself")
    answers = not config.task.name and needs_answer(config.task.reward)
    return {name: read_rows(Path(path), answers, f"eval.sets.{name}") for name, path in config.eval.sets.items()}


def read_rows(path: Path, answers: bool = False, setting: str = "task.data") -> list[Columns]:
    """Every row, checked. The kind of data is told by what lies at the path, which this setting names."""
    rows = [_checked(row, where, answers) for where, row in _numbered(path, setting)]
    if not rows:
        raise ConfigError(f"{path} has no rows; write at least one, with a prompt")
    return rows


def _numbered(path: Path, setting: str) -> Iterator[tuple[str, Any]]:
    """Rows with the place to name in an error."""
    if path.is_dir():
        return _directory(path)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; {setting} is a JSONL or parquet file, or a saved dataset directory")
    if path.suffix == ".parquet":
        return _tables(_parquet([path]))
    if path.suffix == ".arrow":
        return _tables(_arrow([path]))
    return _jsonl(path)


# ------------------------------------------------------------------------------------------------------------ formats


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            if len(line) == LONGEST_LINE:
                raise ConfigError(f"{path}, line {number} has {LONGEST_LINE:,} bytes or more; write one row per line")
            if line.strip():
                yield f"{path}, line {number}", _json(line, f"{path}, line {number}")


def _json(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
    except MALFORMED as error:
        raise ConfigError(f"{where} is not valid JSON ({error}); write one JSON object per line") from None


def _directory(path: Path) -> Iterator[tuple[str, Any]]:
    files = files_of(path)
    return _tables((_arrow if files[0].suffix == ".arrow" else _parquet)(files))


def files_of(path: Path) -> list[Path]:
    """The files that hold the rows: of a directory what `save_to_disk` leaves behind, with splits or without, or
    parquet files."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        return files_of(_chosen_split(path))
    files = sorted(path.glob("*.arrow")) or sorted(path.glob("*.parquet"))
    if not files:
        raise ConfigError(f"{path} holds no dataset; name a directory made by save_to_disk, or a JSONL or parquet file")
    return files


def _chosen_split(path: Path) -> Path:
    """Of a dataset with splits: the one to train on. A name is that of a folder right here, wherever it points."""
    file = path / "dataset_dict.json"
    try:
        splits = msgspec.json.decode(file.read_bytes(), type=_Splits).splits
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{file} cannot be read ({error}); is the dataset complete?") from None
    if not splits or any(Path(name).name != name or name in ("", "..") for name in splits):
        raise ConfigError(f"{file} names no splits, or such as are not folders beside it; is the dataset complete?")
    if "train" in splits or len(splits) == 1:
        return path / ("train" if "train" in splits else splits[0])
    raise ConfigError(f"{path} has the splits {', '.join(splits)}; name one of them, for example {path / splits[0]}")


class _Splits(msgspec.Struct):
    splits: list[str]


def _parquet(files: list[Path]) -> Iterator[tuple[Path, Any]]:
    reader = _pyarrow("pyarrow.parquet", files[0])
    for file in files:
        with _readable(file):
            parts = reader.ParquetFile(file)
            groups = [parts.metadata.row_group(each) for each in range(parts.num_row_groups)]
            if not 0 <= (size := sum(group.total_byte_size for group in groups)) <= MOST_BYTES:
                raise ValueError(f"it says that it unpacks to {size:,} bytes")
            yield file, parts.read()


def _arrow(files: list[Path]) -> Iterator[tuple[Path, Any]]:
    """Arrow files as the `datasets` package writes them: a stream of batches, rarely a file with a footer."""
    reader = _pyarrow("pyarrow.ipc", files[0])
    for file in files:
        with _readable(file), file.open("rb") as source:
            footed = source.read(6) == b"ARROW1"
            source.seek(0)
            yield file, (reader.open_file if footed else reader.open_stream)(source).read_all()


# What pyarrow raises for a damaged file, which is nearly everything.
DAMAGE = (OSError, ValueError, KeyError, IndexError, TypeError, NotImplementedError, MemoryError, OverflowError)


class _readable:  # noqa: N801 (reads as the statement it is)
    """A damaged file becomes a sentence about that file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DAMAGE) and not isinstance(error, ConfigError):
            raise ConfigError(f"{self.file} cannot be read ({error}); is it complete, and of the kind its name says?")


def _pyarrow(module: str, file: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"reading {file} needs the package pyarrow; run pip install 'tailrace[parquet]', or write the rows as JSONL"
        ) from None


def _tables(tables: Iterator[tuple[Path, Any]]) -> Iterator[tuple[str, Any]]:
    for file, table in tables:
        with _readable(file):
            table.validate(full=True)  # or offsets that point outside the file would be followed
            rows = table.to_pylist()
        for number, row in enumerate(rows, start=1):
            yield f"{file}, row {number}", row


# ------------------------------------------------------------------------------------------------------------- checks


def _checked(row: Any, where: str, answers: bool) -> Columns:
    if not isinstance(row, dict):
        raise ConfigError(f'{where} is not an object; write {{"prompt": "...", "answer": "..."}}')
    columns = cast("Columns", row)
    if _is_deeper(columns, DEEPEST):
        raise ConfigError(f"{where} has values nested more than {DEEPEST} deep; write them flatter")
    _check_prompt(columns, where)
    answer = _answer(columns)
    if answers and answer is None:
        raise ConfigError(f"{where} has no answer; write one as 'answer', or a task.reward that needs none")
    return columns if answer is None else columns | {"answer": answer}


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner if isinstance(each, dict | list))


def _check_prompt(row: Columns, where: str) -> None:
    if row.get("prompt") is None:
        raise ConfigError(f"{where} has no 'prompt'; it has {', '.join(row) or 'nothing'}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where} has an empty prompt; write one, or remove the row")
    elif not isinstance(prompt, list):
        raise ConfigError(f"{where} has a prompt that is {_kind(prompt)}; write text or a list of messages")
    else:
        _check_messages(cast("list[Any]", prompt), where)


def _check_messages(messages: list[Any], where: str) -> None:
    for message in messages:
        parts = cast("Columns", message) if isinstance(message, dict) else {}
        if not isinstance(parts.get("role"), str) or not isinstance(parts.get("content"), str):
            raise ConfigError(f"{where} has a message without a role or text; write {EXAMPLE}")
    if not messages or messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where} leaves nothing to answer: its messages must end with one that is not the assistant's"
        )


EXAMPLE = '{"role": "user", "content": "..."}'


def _answer(row: Columns) -> Any:
    """Under the names that people use; verl keeps it inside `reward_model`."""
    for name in ("answer", "ground_truth"):
        if row.get(name) is not None:
            return row[name]
    model = row.get("reward_model")
    return cast("Columns", model).get("ground_truth") if isinstance(model, dict) else None


def _kind(value: Any) -> str:
    return {int: "a number", float: "a number", bool: "true or false", dict: "an object"}.get(type(value), "no text")
