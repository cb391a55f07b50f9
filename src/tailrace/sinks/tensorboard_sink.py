"""RUN/log/tensorboard: event files, as `tensorboard --logdir` reads them. Samples are texts."""

from __future__ import annotations

import time
from typing import Any

from tailrace.sinks.base import Logged, SampleText, TrackedRun

FOLDER = "tensorboard"


class TensorBoardSink:
    def __init__(self, run: TrackedRun, position: int) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / FOLDER))
        self._rows = position

    def log(self, row: Logged) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        if row.samples:
            values.append(_text("samples", "\n\n".join(map(_shown, row.samples))))
        self._writer.add_event(Event(wall_time=time.time(), step=row.step, summary=Summary(value=values)))
        self._rows += 1

    def flush(self) -> int:
        self._writer.flush()
        return self._rows

    def close(self, ended: bool) -> None:
        self._writer.close()


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore
    from tensorboard.plugins.text.metadata import create_summary_metadata

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    metadata = create_summary_metadata(display_name=tag, description="")
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _shown(sample: SampleText) -> str:
    """As code, in Markdown: what a model wrote is shown as it is, whatever it looks like."""
    reward = "-" if sample.reward is None else f"{sample.reward:g}"
    text = f"{sample.prompt}\n---\n{sample.completion}"
    body = "\n".join([f"    {line}" for line in text.splitlines()])
    return f"t{sample.trajectory}: reward {reward}, {sample.tokens:,} tokens, {sample.finish}\n\n{body}"
