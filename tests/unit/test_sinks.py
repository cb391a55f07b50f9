"""What a tracker needs is known before a run begins; and what it is told is told once."""

from __future__ import annotations

import importlib.util

import pytest

from tailrace.cli import main
from tailrace.config.errors import ConfigError
from tailrace.sinks import packages, wandb_sink
from tailrace.sinks.base import Logged, SampleText, TrackedRun
from tailrace.sinks.jsonl_sink import METRICS, SAMPLES, JsonlSink


def test_a_missing_package_is_a_sentence_with_what_to_install(monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    packages.check_packages(["jsonl"])
    with pytest.raises(ConfigError, match=r"logging to wandb needs a package: pip install 'tailrace\[wandb\]'"):
        packages.check_packages(["jsonl", "wandb"])


def test_training_is_refused_before_it_starts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=importlib.util.find_spec: found(name))
    assert main(["log", str(tmp_path), "--to", "paper"]) == 2
    assert "'paper', which is no tracker; there are jsonl, tensorboard" in capsys.readouterr().err


def test_wandb_says_how_to_log_in(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert "wandb login" in wandb_sink.note()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not wandb_sink.note()
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert not wandb_sink.note()


def test_lines_after_the_noted_position_are_written_again_and_not_twice(tmp_path):
    run = TrackedRun("id", "run", "project", tmp_path, {})
    sample = SampleText(1, 2, 3, "what?", "that", 1.0, 4, "stop")
    sink = JsonlSink(run, 0)
    sink.log(Logged(1, 0.5, {"loss": 1.0}, [sample]))
    position = sink.flush()
    sink.log(Logged(2, 1.0, {"loss": 2.0}, [sample]))
    sink.close(ended=False)  # killed before it could note where it was
    sink = JsonlSink(run, position)
    sink.log(Logged(2, 1.0, {"loss": 2.0}, [sample]))
    sink.close(ended=True)
    assert (tmp_path / METRICS).read_text().count("\n") == (tmp_path / SAMPLES).read_text().count("\n") == 2
