"""Tailrace from Python: a script, a notebook kernel, rows as pandas has them, by the public names alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

import tailrace
from runs import EMULATED, START
from tailrace.store.journal import Journal

PATIENCE_S = 150  # for a cell
SETTINGS = f"""
import tailrace

rows = [
    {{"prompt": "<bos>s 3 4 7 ?", "answer": str(number), "bonus": 0.25}} for number in range(40)
]
settings = dict(
    model={str(START)!r},
    workload=dict(prompts_per_step=2, group_size=2, prompt_tokens=100, max_completion_tokens=32),
    rollout=dict(kv_tokens=4096), trainer=dict(mini_batches=1, threads=1), health=dict(strikes=60),
    local=dict(replicas=1), evaluate=False, eval_rows=2, learning_rate=1e-4, steps=2,
)
"""


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = folder / "mine.py"
    file.write_text(SETTINGS + textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(file)], cwd=folder, capture_output=True, text=True, timeout=170, check=False
    )


def test_a_script_trains_with_its_own_function_and_reads_the_run_as_rows(tmp_path: Path) -> None:
    """No main guard, a closure as reward, rows in memory, callbacks."""
    done = script(
        tmp_path,
        """
        offset = 0.5

        def make(scale):
            def judge(completion, answer, bonus):
                return offset + bonus + scale * len(completion)
            return judge

        seen = []
        note = lambda run, row: seen.append(row["step"])
        run = tailrace.train(data=rows, reward=make(0.001), callbacks=[note], **settings)
        assert seen == [0, 1], seen
        assert run.state == "complete", run
        assert [row["step"] for row in run.metrics] == [0, 1]
        for row in run.metrics:
            assert row["reward"] >= 0.75 and row["samples"] == 4 and row["lr"] == 1e-4, row
        trained = list(run.samples(state="trained"))
        assert len(trained) == 8
        for row in trained:
            assert abs(row["reward"] - 0.75 - 0.001 * len(row["completion"])) < 0.01, row
            assert row["prompt"].startswith("<bos>s") and row["bonus"] == 0.25, row
        assert run.checkpoints[-1]["version"] == 2 and run.checkpoints[-1]["bytes"] > 1000
        assert run.path.name == "mine"

        import pandas
        frame = pandas.DataFrame(run.metrics)
        assert list(frame["step"]) == [0, 1] and frame["reward"].min() >= 0.75
        assert len(pandas.DataFrame(run.samples(text=False))) >= 8

        try:
            run.resume(reward=make(0.5))
        except ValueError as error:
            assert "a run keeps its task.reward; tailrace.fork(run, ...)" in str(error), error
        other = tailrace.fork(run, version=2, name="other", steps=1, reward=make(0.0), show=False)
        assert other.state == "complete" and [row["reward"] for row in other.metrics] == [0.75]

        import shutil
        shutil.rmtree(run.path)
        assert str(other.path.resolve() / "inputs") in other.config.task.data, "copied from the first run"
        other.resume(steps=2, show=False)
        assert len(other.metrics) == 2
        print("all is well")
        """,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all is well" in done.stdout


def test_what_cannot_be_sent_and_what_is_misspelt_is_refused_by_name(tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()

    def judge(completion: str) -> float:
        with lock:
            return 1.0

    common: dict[str, Any] = {"model": START, "data": [{"prompt": "a", "answer": "b"}], "folder": str(tmp_path)}
    with pytest.raises(ValueError, match=r"the function 'judge' cannot be sent .*: it uses lock;"):
        tailrace.train(reward=judge, **common)
    with pytest.raises(
        ValueError, match=r"num_generations is TRL's name, not an argument here; write group_size=\.\.\."
    ):
        tailrace.train(num_generations=8, **common)
    with pytest.raises(ValueError, match="model is object; write the path of a directory"):
        tailrace.train(model=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no run"):
        tailrace.Run(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"data": 5}, "data is int; write rows, each a dictionary, or the path of a file"),
        ({"data": {"train": [], "test": []}}, "data is dict of 'train', 'test'; write rows, .* or one split of it"),
        ({"data": [{"prompt": "a"}, "b"]}, "row 2 of the data is str; write dictionaries"),
        ({"data": [{"prompt": "a"}, {"prompt": "\ud800"}]}, r"row 2 of data has '\\ud800', half of a character"),
        ({"data": [{"prompt": object()}]}, "row 1 of data cannot be written as JSON: object is no JSON"),
        ({"reward": 5}, "reward is int; write a function, or 'file.py:function'"),
        ({"callbacks": print}, r"callbacks is builtin_function_or_method; .*: callbacks=\[function\]"),
        ({"callbacks": [5]}, "callbacks has 5, which is no function"),
    ]
    with pytest.raises(ValueError, match="a file of settings is dict; write its path, or settings as arguments"):
        tailrace.train({"run": {"steps": 2}})  # type: ignore[arg-type]
    for arguments, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            tailrace.train(**common | arguments)
    assert not list(tmp_path.iterdir()) or not (tmp_path / "run.db").exists()


def test_a_run_beside_the_program_can_be_stopped_and_resumed(tmp_path: Path) -> None:
    file = tmp_path / "emulated.toml"
    file.write_text(EMULATED)
    common: dict[str, Any] = {"folder": str(tmp_path / "runs"), "show": False}
    first = tailrace.train(file, steps=100_000, wait=False, callbacks=[lambda run, row: row["step"] >= 2], **common)
    first.wait(120)
    assert first.state == "interrupted"
    assert len(first.metrics) >= 3

    seen: list[int] = []
    again = tailrace.train(file, steps=2, **common)
    assert (again.path.name, again.state) == ("emulated-2", "complete"), "nobody has named it"
    again.resume(steps=3, learning_rate=5e-5, show=False, callbacks=[lambda run, row: seen.append(row["step"])])
    assert seen == [2], "earlier steps are not told again"
    assert Journal(again.path).config.trainer.learning_rate == 5e-5

    def fails(run: tailrace.Run, row: dict[str, Any]) -> None:
        raise LookupError("of the callback")

    with pytest.raises(LookupError, match="of the callback"):
        tailrace.train(file, name="third", steps=100_000, callbacks=[fails], **common)
    assert tailrace.Run(tmp_path / "runs" / "third").state == "interrupted"


def test_a_simulation_gives_rows() -> None:
    small: dict[str, Any] = {"steps": 3, "prompts_per_step": 16, "group_size": 4, "max_completion_tokens": 2048}
    rows = tailrace.simulate(model={"preset": "qwen2.5-7b"}, gpus=16, schedules=["sync", "trajectory"], **small)
    assert [row["schedule"] for row in rows] == ["sync", "trajectory"]
    assert all(row["tokens_per_s"] > 0 and "staleness_mean" in row for row in rows)
    with pytest.raises(ValueError, match="did you mean"):
        tailrace.simulate(model={"preset": "qwen2.5-7b"}, max_stalenes=1)


def test_a_notebook_trains_with_functions_of_its_cells(tmp_path: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        run_cell(client, SETTINGS)
        run_cell(client, "half = 0.5\ndef judge(completion, answer):\n    return half + 0.25")
        run_cell(client, "reward = lambda completion, answer: judge(completion, answer)")
        run_cell(client, "run = tailrace.train(data=rows, reward=reward, wait=False, **settings)")
        run_cell(client, "assert run.wait().state == 'complete' and run.path.name == 'notebook', run")
        run_cell(client, "assert [row['reward'] for row in run.metrics] == [0.75, 0.75], run.metrics")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client: Any, code: str) -> None:
    """Until the kernel is idle again; what it raised is the failure of the test."""
    asked = client.execute(code)
    while True:
        try:
            message = client.get_iopub_msg(timeout=PATIENCE_S)
        except Empty:
            pytest.fail(f"the kernel said nothing for {PATIENCE_S} s of {code}")
        if message["parent_header"].get("msg_id") != asked:
            continue
        if message["msg_type"] == "error":
            pytest.fail("\n".join(message["content"]["traceback"]))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, tailrace; print({'torch', 'numpy', 'msgspec', 'asyncio', 'tailrace.api'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
