"""Settings of the vLLM engine: what is refused and how, its own table, its Python, and those of a worker alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tailrace.config import ConfigError, load, with_options
from tailrace.config.tree import Config
from tailrace.launch.vllm_python import VllmPackages, check_vllm, describe_vllm, packages_of

MODEL = ["--model.preset", "qwen2.5-7b"]
VLLM = [*MODEL, "--rollout.engine", "vllm"]


def with_python(python: str) -> Config:
    return load([], [*VLLM, "--rollout.python", python])


def script(folder: Path, text: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "write rollout.python"),
        (["--rollout.python", "p", "--rollout.vllm.seed", "3"], "rollout.vllm.seed is not yours to set; it has to be"),
        (["--rollout.python", "p", "--rollout.vllm.dtype", "half"], "write rollout.precision instead"),
        (["--rollout.python", "p", "--rollout.vllm.data_parallel_size", "2"], "write local.replicas instead"),
        (["--rollout.python", "p", "--trainer.engine", "emulated"], "write 'emulated' for both or for none"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        load([], [*VLLM, *words])


def test_its_table_is_handed_on_as_it_is(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        """
        [model]
        preset = "qwen2.5-7b"
        [rollout]
        engine = "vllm"
        python = "env/bin/python"
        [rollout.vllm]
        tensor_parallel_size = 2
        [rollout.vllm.compilation_config]
        max_cudagraph_capture_size = 256
        """
    )
    config = load([file], ["--rollout.vllm.enforce_eager", "true"])
    wanted = {"tensor_parallel_size": 2, "compilation_config": {"max_cudagraph_capture_size": 256}}
    assert config.rollout.vllm == wanted | {"enforce_eager": True}
    assert config.trainer.engine == "native"
    assert config.local.start_s > Config().local.start_s


def test_its_python_is_beside_the_file_and_stays_the_link_that_it_is(tmp_path: Path):
    (tmp_path / "python").symlink_to(sys.executable)
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "qwen2.5-7b"\n[rollout]\nengine = "vllm"\npython = "./python"\n')
    assert load([file]).rollout.python == str(tmp_path / "python")


def test_a_worker_may_have_another_engine_and_nothing_else():
    run = load([], [*MODEL, "--run.steps", "7"])
    own = with_options(run, ["--rollout.engine", "vllm", "--rollout.python", "/opt/python"], "rollout.")
    assert (own.rollout.engine, own.rollout.python, own.run.steps) == ("vllm", "/opt/python", 7)
    assert with_options(own, ["--rollout.engine", "native"], "rollout.").rollout.engine == "native"
    with pytest.raises(ConfigError, match=r"--run\.steps is the run's; only --rollout\.\* can be set here"):
        with_options(run, ["--run.steps", "3"], "rollout.")


def test_a_python_that_is_no_good_is_told_apart(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        packages_of(str(tmp_path / "nothing"))
    (tmp_path / "text").write_text("text")
    with pytest.raises(ConfigError, match="is no program"):
        packages_of(str(tmp_path / "text"))
    with pytest.raises(ConfigError, match="does not run as a Python"):
        packages_of(script(tmp_path, "echo hello"))
    empty = script(tmp_path, f'PYTHONPATH= exec {sys.executable} -S -E "$@"')
    with pytest.raises(ConfigError, match="has no vLLM; install it there"):
        packages_of(empty)
    assert "cannot be used" in describe_vllm(with_python(empty))


def test_a_version_that_was_never_tried_is_said(tmp_path: Path):
    tried = '{"python": "3.12.1", "vllm": "0.32.0", "torch": "2.13.0", "msgspec": "0.20"}'
    known = with_python(script(tmp_path, f"echo '{tried}'"))
    assert check_vllm(known) == ""
    assert describe_vllm(known).startswith("vLLM 0.32.0, torch 2.13.0, Python 3.12.1; tried: 0.24.x on an H200")
    newer = with_python(script(tmp_path, f"echo '{tried.replace('0.32.0', '0.99.0')}'"))
    for said in (check_vllm(newer), describe_vllm(newer)):
        assert "0.99.0, which was not tried; 0.24.x on an H200" in said
        assert "run the contract suite" in said
    assert check_vllm(load([], MODEL)) == ""


def test_its_packages_are_those_of_its_own_environment():
    found = VllmPackages("3.11.1", "0.24.0+cu130", "2.11.0", "0.20")
    assert found.tried
    assert os.path.exists(sys.executable)
