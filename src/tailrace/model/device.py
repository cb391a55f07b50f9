"""Selects the device that rollouts or the trainer compute on, or says in one sentence why it cannot.

`tailrace train` checks before anything starts, in a process of its own: a CUDA context holds GPU memory from then on,
and a driver that hangs or crashes must not take the command with it. The workers check again where they run, and
`tailrace doctor` prints the result. torch is imported by `survey` and `try_bfloat16` only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.logs import output
from tailrace.model.load import precision_on
from tailrace.model.numa import numa_of, pci_address
from tailrace.types import Card, Struct

AMPERE = (8, 0)  # the compute capability that bfloat16 and our kernels need
ANSWER_S = 120.0  # for importing torch and initializing CUDA
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: NVIDIA, AMD, WSL
SURVEY, BFLOAT16 = "survey", "bfloat16"
NARROWER = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
OTHER_PRECISION = {"rollout": "float16", "trainer": "float32"}  # for a card without bfloat16

ComputeRole = Literal["rollout", "trainer"]


class Survey(Struct):
    """What torch reports about the GPUs of this machine."""

    torch: str  # its version
    built_for: str = ""  # the CUDA version; empty: a CPU build
    architectures: tuple[str, ...] = ()  # that it was compiled for; empty: unknown
    cards: tuple[Card, ...] = ()
    problem: str = ""  # torch's reason why there are no cards
    triton: bool = False

    def has_kernels(self, card: Card) -> bool:
        return self.triton and card.capability >= AMPERE


def survey_for(config: Config) -> Survey | None:
    """What torch reports, if these settings would use a GPU; else nobody is asked."""
    wanted = [_section(config, role).device for role in _native_roles(config)]
    if any(name.startswith("cuda") or (not name and has_device_files()) for name in wanted):
        return survey_apart()
    return None


def check_devices(config: Config, seen: Survey | None) -> str:
    """Refuse devices that this machine does not have. Returns a notice about the others, or nothing."""
    roles = _native_roles(config)
    wanted = [_section(config, role).device for role in roles]
    for role in roles:
        if usable_device(role, config, seen or Survey("")) == "cpu":
            _refuse_false_bfloat16(role, config)
    if seen is None or seen.cards or "" not in wanted:
        return ""
    return f"this run computes on the CPU: {_why_no_cards(seen)}"


def usable_device(role: ComputeRole, config: Config, seen: Survey | None = None) -> str:
    """The role's device as torch writes it. `seen`: a survey that was made before; None: make one if needed."""
    wanted = _section(config, role).device
    if wanted == "cpu":
        return wanted
    seen = seen or survey()
    if not seen.cards and not wanted:
        return "cpu"
    problem = next(_problems(role, config, seen), None)
    if problem is not None:
        raise ConfigError(f'{problem}, or write {role}.device = "cpu"')
    return wanted or "cuda"


def has_device_files() -> bool:
    return any(True for pattern in DEVICE_FILES for _ in Path("/dev").glob(pattern))


def _native_roles(config: Config) -> list[ComputeRole]:
    roles: list[ComputeRole] = ["rollout", "trainer"]
    return [role for role in roles if _section(config, role).engine != "emulated"]


def _section(config: Config, role: ComputeRole) -> Any:
    return getattr(config, role)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# ------------------------------------------------------------------------------------------------------------- refusals


def _problems(role: ComputeRole, config: Config, seen: Survey) -> Iterator[str]:
    section = _section(config, role)
    wanted: str = section.device
    if not seen.cards:
        yield f'{role}.device is "{wanted}", but {_why_no_cards(seen)}'
        return
    number = int(wanted.partition(":")[2] or 0)
    if number >= len(seen.cards):
        yield f'{role}.device is "{wanted}", but the last GPU here is "cuda:{len(seen.cards) - 1}"; write that'
        return
    mine = [seen.cards[number]] if ":" in wanted else seen.cards
    for card in mine:
        yield from _too_old(role, section.precision, card, seen)


def _why_no_cards(seen: Survey) -> str:
    if not seen.built_for:
        return f"torch {seen.torch} is a build without CUDA; install one with it (pytorch.org names the command)"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        return f'CUDA_VISIBLE_DEVICES is "{hidden}", which leaves no GPU to use; change or unset it'
    if not has_device_files():
        return "there is no GPU on this machine; run where there is one"
    return (
        f"torch {seen.torch}, built for CUDA {seen.built_for}, cannot use the GPU here ({seen.problem}); install "
        "a driver that fits it, or the torch build that fits the driver (nvidia-smi names its CUDA version)"
    )


def _too_old(role: ComputeRole, precision: str, card: Card, seen: Survey) -> Iterator[str]:
    if not _has_code_for(card, seen.architectures):
        have = ", ".join(seen.architectures)
        yield (
            f"{role}.device: torch {seen.torch} has no code for {card.name} ({card.age}), only for {have}; install "
            "a torch build that has it"
        )
    elif card.capability < AMPERE and precision_on("cuda", precision) == "bfloat16":
        yield (
            f"{role}.device: {card.name} ({card.age}) is too old for bfloat16, which needs {_dotted(AMPERE)}; write "
            f'{role}.precision = "{OTHER_PRECISION[role]}", which runs there without the fused kernels'
        )


def _has_code_for(card: Card, architectures: tuple[str, ...]) -> bool:
    """`sm_...` code runs on later cards of its own generation, `compute_...` (PTX) on all later ones."""
    if not architectures:
        return True
    for name in architectures:
        kind, _, digits = name.partition("_")
        made_for = divmod(int("".join(filter(str.isdigit, digits)) or 0), 10)
        if made_for <= card.capability and (kind == "compute" or made_for[0] == card.capability[0]):
            return True
    return False


# --------------------------------------------------------------------------------------------------------------- survey


def survey() -> Survey:
    """Query torch in this process."""
    import torch

    cards, problem = (), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `problem` has the text
        try:
            torch.cuda.init()
            cards = tuple(_card(n, torch.cuda.get_device_properties(n)) for n in range(torch.cuda.device_count()))
        except (RuntimeError, AssertionError) as error:
            problem = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    amd = torch.version.hip
    architectures = () if amd or not cards else tuple(torch.cuda.get_arch_list())
    built_for = torch.version.cuda or amd or ""
    return Survey(str(torch.__version__), built_for, architectures, cards, problem, find_spec("triton") is not None)


def _card(number: int, found: Any) -> Card:
    node, cpus = numa_of(pci_address(number))
    return Card(found.name, found.total_memory, (found.major, found.minor), node, cpus)


def survey_apart() -> Survey:
    """The same in a process of its own."""
    done = _apart(SURVEY)
    if done.returncode:
        last_line = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise ConfigError(f"torch could not list the GPUs of this machine: {last_line}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Survey)


def _apart(question: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tailrace.model.device", question]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"torch did not list the GPUs of this machine within {ANSWER_S:.0f} s; see whether nvidia-smi answers"
        ) from None


# ---------------------------------------------------------------------------------------------------- bfloat16 on a CPU


def _refuse_false_bfloat16(role: ComputeRole, config: Config) -> None:
    if _section(config, role).precision == "bfloat16" and bfloat16_kills():
        raise ConfigError(
            f'{role}.precision is "bfloat16", but this CPU announces AMX without having it, so torch would crash; '
            f'export {NARROWER}, or write {role}.precision = "float32"'
        )


def bfloat16_kills() -> bool:
    """Whether a bfloat16 matrix product kills the process: some virtual machines announce instructions they lack."""
    return _announces_amx() and _apart(BFLOAT16).returncode == -signal.SIGILL


def _announces_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def try_bfloat16() -> None:
    import torch

    square = torch.ones(128, 128, dtype=torch.bfloat16)
    torch.nn.functional.linear(square, square, square[0])


def main(question: str) -> int:
    if question == BFLOAT16:
        try_bfloat16()
    else:
        output(msgspec.json.encode(survey()).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
