"""The inputs of a run, pinned when it begins and compared when it resumes: its data, the user's code, the model.

Data, code, tokenizer and settings of the model are pinned by all that is in them, weights by their size, their header
and a few thousand blocks: another model is noticed, one flipped bit in a large one is not. A run that went on with
other inputs would mix both without a word, so it is refused, unless a person says that it is meant so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import xxhash

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.store.database import FILE
from tailrace.store.errors import JournalError
from tailrace.store.journal import Meta, date
from tailrace.types import MALFORMED, Struct

KEY, ACCEPTED = "inputs", "accepted_inputs"  # in the run's meta table
OPTION = "--accept-changed-inputs"
MODEL_FILES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}  # beside its weights, what a model is loaded from
WEIGHTS = {".safetensors", ".gguf"}
SMALL = 64 << 20  # bytes of weights that are read in full
HEADER = 16 << 20  # bytes at the beginning of weights that are read in full
BLOCK, BLOCKS = 4096, 4096  # bytes; how many of them are read of the rest
PIECE = 1 << 24


class Pin(Struct):
    size: int
    digest: str


Pins = dict[str, Pin]


class Acceptance(Struct):
    """Somebody wanted the run to go on with these changes."""

    after: int  # the last event before it
    at: str
    changes: list[str]


# ------------------------------------------------------------------------------------------------------------- pinning


def pinned(config: Config) -> Pins:
    """Every file that a run with these settings reads, as it is now."""
    if config.rollout.engine == "emulated":
        files = _length_files(config.workload.lengths.file)
    else:
        files = [*task_files(config), *model_files(config)]
    return {str(file): _pin(file) for file in files}


def task_files(config: Config) -> Iterator[Path]:
    """Data, and code of the user's."""
    from tailrace.envs.code import code_files
    from tailrace.envs.data import files_of
    from tailrace.envs.tasks import folders

    task = config.task
    for data in filter(None, (task.data, task.eval_data, *config.eval.sets.values())):
        yield from files_of(Path(data))
    for setting, code in (("task.reward", task.reward), ("task.name", task.name)):
        if ":" in code:
            yield from code_files(code, folders(task), setting)


def _length_files(path: str) -> list[Path]:
    """Lengths in a file, or of a recorded run."""
    return [Path(path) / FILE if Path(path).is_dir() else Path(path)] if path else []


def model_files(config: Config) -> list[Path]:
    """What the run starts from."""
    from tailrace.model.load import gguf_file

    packed = gguf_file(config.model.path)
    if packed is not None:
        return [packed]
    folder, kinds = Path(config.model.path).expanduser(), MODEL_FILES | WEIGHTS
    files = [*folder.iterdir(), *folder.glob("*/*.jinja")]  # some have several chat templates, in a folder
    return sorted(file for file in files if file.suffix in kinds and file.is_file())


def _pin(file: Path) -> Pin:
    try:
        size = file.stat().st_size
        sample = file.suffix in WEIGHTS and size > SMALL
        return Pin(size, _sampled(file, size) if sample else _whole(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); check its permissions") from None


def _whole(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _sampled(file: Path, size: int) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        digest.update(stream.read(HEADER))
        for number in range(BLOCKS):
            stream.seek(HEADER + number * (size - HEADER - BLOCK) // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))
    return f"sampled {digest.hexdigest()}"


# ----------------------------------------------------------------------------------------------------------- comparing


def record(meta: Meta, pins: Pins) -> None:
    meta.set(KEY, msgspec.json.encode(pins).decode())


def recorded(meta: Mapping[str, str] | Meta) -> Pins | None:
    """As they were when the run began, or was last told to accept others; None: an earlier release did not look."""
    text = meta.get(KEY)
    try:
        return None if text is None else msgspec.json.decode(text, type=Pins)
    except MALFORMED as error:
        raise JournalError(f"what the run noted of its inputs cannot be read ({error})") from None


def changes(before: Pins, now: Pins) -> list[str]:
    """Sentences, each about a file."""
    both = [name for name in before if name in now]
    found = [_change(name, before[name], now[name]) for name in both if before[name] != now[name]]
    found += [f"{name} is not read any more" for name in before if name not in now]
    return found + [f"{name} is read now, and was not" for name in now if name not in before]


def _change(name: str, before: Pin, now: Pin) -> str:
    same = "it is as long as it was, but not the same"
    sizes = f"it had {before.size:,} bytes and has {now.size:,}" if before.size != now.size else same
    return f"{name} has changed ({sizes})"


def changed(meta: Mapping[str, str], files: Iterable[Path]) -> list[str]:
    """The same of some of a run's inputs, as they are now."""
    before, now = recorded(meta), {str(file): _pin(file) for file in files}
    return changes({name: pin for name, pin in before.items() if name in now}, now) if before is not None else []


def refuse_changed(before: Pins | None, now: Pins) -> None:
    found = changes(before, now) if before is not None else []
    if found:
        more = f", and {len(found) - 1} more of its inputs are not the same" if len(found) > 1 else ""
        raise ConfigError(
            f"{found[0]}{more} since the run was begun; put back what was there, or go on with what is by {OPTION}"
        )


def settle(meta: Meta, last_seq: int, now: Pins, accept: bool, say: Callable[[str], None]) -> None:
    """Of a run that goes on: refuse other inputs, or remember them."""
    before = recorded(meta)
    if not accept:
        refuse_changed(before, now)
    found = changes(before, now) if before is not None else []
    if found:
        say(f"the run goes on with changed inputs: {'; '.join(found)}")
        _remember(meta, Acceptance(last_seq, date(), found))
    record(meta, now)


def _remember(meta: Meta, acceptance: Acceptance) -> None:
    earlier = msgspec.json.decode(meta.get(ACCEPTED) or "[]", type=list[Acceptance])
    meta.set(ACCEPTED, msgspec.json.encode([*earlier, acceptance]).decode())
