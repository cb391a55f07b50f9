"""All samples of a run as one parquet file: a row for each, with its text, tokens, log-probs and the version of every
token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tailrace.config.errors import ConfigError
from tailrace.samples.messages import NOT_SAMPLED, Piece, StoredSample
from tailrace.sinks.sample_text import SampleTexts
from tailrace.store.journal import Journal
from tailrace.store.trajectories import KnownTrajectory, trajectories_after
from tailrace.types import EVALUATION, TOKEN_BYTES, token_ids

ROWS = 500  # that are in memory at once

Row = dict[str, Any]


def write_trajectories(run: Path, out: Path) -> int:
    """Returns how many. What has no tokens (any more) has a row without them."""
    arrow, parquet = _pyarrow()
    schema, count = _schema(arrow), 0
    texts = SampleTexts(run, Journal(run).config)
    try:
        with parquet.ParquetWriter(out, schema) as writer:
            for rows in _batches(run, texts):
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                count += len(rows)
    finally:
        texts.close()
    return count


def _batches(run: Path, texts: SampleTexts) -> Iterator[list[Row]]:
    last = -1
    while known := trajectories_after(run, last, ROWS):
        last = known[-1].id
        yield [_row(one, texts) for one in known]


def _row(known: KnownTrajectory, texts: SampleTexts) -> Row:
    row: Row = {name: getattr(known, name) for name in known.__struct_fields__ if name not in ("payload", "store")}
    row["evaluation"] = known.id >= EVALUATION
    stored = texts.stored(known)
    if stored is None:
        return row
    prompt, completion = texts.text(stored)
    return row | {"prompt_text": prompt, "completion_text": completion} | _tokens(stored)


def _tokens(stored: StoredSample) -> Row:
    prompt, *pieces = stored.pieces
    return {
        "prompt_ids": token_ids(bytes(prompt.tokens)),
        "completion_ids": list(chain(*[token_ids(bytes(piece.tokens)) for piece in pieces])),
        "logprobs": list(chain(*map(_logprobs, pieces))),
        "versions": list(chain(*[[_version(piece)] * (len(piece.tokens) // TOKEN_BYTES) for piece in pieces])),
    }


def _version(piece: Piece) -> int:
    return NOT_SAMPLED if piece.version is None else piece.version


def _logprobs(piece: Piece) -> list[float | None]:
    """None where the policy did not sample: what a tool answered."""
    import numpy as np

    if piece.logprobs is None:
        return [None] * (len(piece.tokens) // TOKEN_BYTES)
    return np.frombuffer(bytes(piece.logprobs), "<f4").tolist()


def _schema(arrow: Any) -> Any:
    whole, text = arrow.int64(), arrow.string()
    lists = {"prompt_ids": arrow.int32(), "completion_ids": arrow.int32(), "logprobs": arrow.float32()}
    columns = {"id": whole, "group": whole, "prompt": whole, "state": text, "tokens": whole, "oldest": whole}
    columns |= {"newest": whole, "finish": text, "reward": arrow.float64(), "reason": text, "step": whole}
    columns |= {"evaluation": arrow.bool_(), "prompt_text": text, "completion_text": text}
    columns |= {name: arrow.list_(kind) for name, kind in lists.items()}
    return arrow.schema(columns | {"versions": arrow.list_(arrow.int32())})


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("writing parquet needs a package: pip install 'tailrace[parquet]'") from None
    return pyarrow, pyarrow.parquet
