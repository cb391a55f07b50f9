"""Which device a component of a run gets, and the sentence for every reason why it gets none."""

from __future__ import annotations

import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tailrace.config.check import check
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config, Model, Rollout, Trainer
from tailrace.launch import doctor
from tailrace.model import device
from tailrace.model.device import Survey, check_devices, survey_for, usable_device
from tailrace.model.memory import ran_out
from tailrace.types import Card

H200 = Card("NVIDIA H200", 150 << 30, (9, 0))
T4 = Card("Tesla T4", 16 << 30, (7, 5))
CODE = ("sm_75", "sm_80", "sm_90")
GOOD = Survey("2.13", "13.0", CODE, (H200, H200), triton=True)
OLD = Survey("2.13", "13.0", CODE, (T4,), triton=True)
NO_DRIVER = Survey("2.13", "13.0", problem="The NVIDIA driver on your system is too old (found version 11040)")
CPU_BUILD = Survey("2.13+cpu")


def config(trainer: str = "", rollout: str = "", ranks: int = 1, precision: str = "") -> Config:
    own = Trainer(device=trainer, ranks=ranks, precision="float32" if precision == "float32" else "")
    return Config(trainer=own, rollout=Rollout(device=rollout, precision="float16" if precision == "float16" else ""))


def checked(config: Config) -> str:
    """As before a run: what is wrong with its devices, or worth a note."""
    return check_devices(config, survey_for(config))


@pytest.fixture
def card_files(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_device_files", lambda: True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_an_open_choice_is_the_cpu_and_cuda_is_refused():
    assert usable_device("trainer", config()) == "cpu"
    for name in ("cuda", "cuda:3"):
        with pytest.raises(ConfigError, match=rf'trainer.device is "{name}", but .*write trainer.device = "cpu"'):
            usable_device("trainer", config(name))


@pytest.mark.parametrize("name", ["", "cuda", "cuda:1"])
def test_with_gpus_they_are_used(name):
    assert usable_device("rollout", config(rollout=name), GOOD) == (name or "cuda")
    assert usable_device("trainer", config("cpu"), GOOD) == "cpu"


@pytest.mark.parametrize(
    ("wanted", "seen", "words"),
    [
        (config("cuda"), CPU_BUILD, "without CUDA"),
        (config("cuda"), NO_DRIVER, r"too old \(found version 11040\).*driver"),
        (config("cuda:2"), GOOD, r'last GPU here is "cuda:1"'),
        (config("cuda"), OLD, r'Tesla T4 \(compute capability 7.5\).*trainer.precision = "float32"'),
        (config(), OLD, "too old for bfloat16"),
        (config(), Survey("2.13", "13.0", CODE, (Card("Titan Xp", 12 << 30, (6, 1)),)), "no code for Titan Xp"),
    ],
)
def test_what_a_card_cannot_do_is_refused_with_what_to_write(card_files, wanted, seen, words):
    with pytest.raises(ConfigError, match=words):
        usable_device("trainer", wanted, seen)


def test_an_old_card_works_in_a_precision_that_it_has():
    assert usable_device("trainer", config("cuda", precision="float32"), OLD) == "cuda"
    assert usable_device("rollout", config(rollout="cuda", precision="float16"), OLD) == "cuda"


def test_cards_newer_than_the_build_run_portable_code_or_that_of_their_generation():
    newer = Card("next", 1 << 30, (10, 3))
    assert usable_device("trainer", config(), Survey("2.13", "13.0", ("sm_90", "compute_90"), (newer,))) == "cuda"
    assert usable_device("trainer", config(), Survey("2.13", "13.0", ("sm_100a",), (newer,))) == "cuda"
    with pytest.raises(ConfigError, match="no code"):
        usable_device("trainer", config(), Survey("2.13", "13.0", ("sm_90", "sm_120"), (newer,)))


def test_hidden_cards_are_named_as_such(card_files, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        usable_device("trainer", config("cuda"), NO_DRIVER)


def test_one_card_by_number_is_not_for_several_ranks():
    shape = Model(parameters=10**9, layers=2, hidden=8, heads=2)
    with pytest.raises(ConfigError, match=r'"cuda:0", one GPU for 2 trainer.ranks; write trainer.device = "cuda"'):
        check(Config(model=shape, trainer=Trainer(device="cuda:0", ranks=2)))


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA"])
def test_a_name_that_is_no_device(name):
    shape = Model(parameters=10**9, layers=2, hidden=8, heads=2)
    with pytest.raises(ConfigError, match=f'rollout.device is "{name}", which is no device; write "cpu", "cuda"'):
        check(Config(model=shape, rollout=Rollout(device=name)))


# ------------------------------------------------------------------------------------------ what torch says


def test_a_survey_holds_what_torch_says_about_its_cards(monkeypatch):
    found = SimpleNamespace(name="NVIDIA A100", total_memory=80 << 30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    seen = device.survey()
    assert seen.cards == (Card("NVIDIA A100", 80 << 30, (8, 0)),) * 2
    assert seen.architectures == ("sm_80",)
    assert not seen.problem


@pytest.mark.parametrize("error", [RuntimeError("driver too old.\nmore"), AssertionError("driver too old")])
def test_a_driver_that_torch_complains_about_is_a_problem_not_a_crash(monkeypatch, error):
    def init() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", init)
    assert device.survey().problem == "driver too old"
    assert not device.survey().cards


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error, memory):
    assert ran_out(error) == memory


# ------------------------------------------------------------------------------------------ before a run


def test_nothing_is_asked_where_no_gpu_is_wanted_or_there(monkeypatch):
    def ask(_: str) -> None:
        raise AssertionError("nobody had to be asked")

    monkeypatch.setattr(device, "_apart", ask)
    monkeypatch.setattr(device, "has_device_files", lambda: False)
    assert checked(config()) == ""
    monkeypatch.setattr(device, "has_device_files", lambda: True)
    assert checked(config("cpu", "cpu")) == ""
    emulated = Config(trainer=Trainer(device="cuda", engine="emulated"), rollout=Rollout(engine="emulated"))
    assert checked(emulated) == ""


def test_a_gpu_that_stays_unused_is_worth_a_note_unless_it_was_asked_for(card_files, monkeypatch):
    monkeypatch.setattr(device, "survey_apart", lambda: NO_DRIVER)
    assert "computes on the CPU: torch 2.13, built for CUDA 13.0, cannot use" in checked(config())
    with pytest.raises(ConfigError, match=r"rollout.device"):
        checked(config(rollout="cuda"))
    monkeypatch.setattr(device, "survey_apart", lambda: GOOD)
    assert checked(config()) == ""


def test_a_driver_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(device, "ANSWER_S", 0.001)
    with pytest.raises(ConfigError, match="nvidia-smi"):
        device.survey_apart()


@pytest.mark.parametrize("status", [0, -signal.SIGILL])
def test_bfloat16_on_a_cpu_that_only_announces_it(monkeypatch, status):
    monkeypatch.setattr(device, "_announces_amx", lambda: True)
    monkeypatch.setattr(device, "_apart", lambda _: subprocess.CompletedProcess([], status, "", ""))
    half = Config(rollout=Rollout(device="cpu", precision="bfloat16"), trainer=Trainer(device="cpu"))
    if status == 0:
        assert checked(half) == ""
        return
    with pytest.raises(ConfigError, match=r"rollout.precision.*ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        checked(half)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (GOOD, ("NVIDIA H200, 150.0 GiB, compute capability 9.0", "Triton is there: fused kernels", "GPU 1")),
        (OLD, ("Tesla T4", "no fused kernels")),
        (NO_DRIVER, ("can use none", "too old")),
    ],
)
def test_the_doctor_describes_the_cards(monkeypatch, seen, words):
    monkeypatch.setattr(device, "has_device_files", lambda: True)
    monkeypatch.setattr(device, "survey_apart", lambda: seen)
    monkeypatch.setattr(device, "bfloat16_kills", lambda: False)
    report = doctor.examine([], [])
    assert all(word in report for word in words)
