"""`tailrace doctor`: what this machine has, and what these settings would do here or make of the fleet they describe.

Nothing is started and nothing is written. Settings that cannot work raise ConfigError, as everywhere.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent

from tailrace.config import Config, ConfigError, load, with_values
from tailrace.config.tree import SCHEDULES, Cluster
from tailrace.launch.cards import dealt_among, imagined
from tailrace.launch.deal_table import describe_deal
from tailrace.logs import output
from tailrace.model import device
from tailrace.model.device import Survey
from tailrace.obs.tables import render_table
from tailrace.release import __version__
from tailrace.types import Card
from tailrace.wording import counted

PACKAGES = (
    ("matplotlib", "--plot can write .png", "--plot can write .html only; install tailrace[plot] for .png"),
    ("torch", "there for training", "needed by train only; install tailrace[train]"),
    ("transformers", "there for loading models", "needed by train only; install tailrace[train]"),
)
Section = tuple[str, list[tuple[str, str]]]


def print_report(files: Sequence[str], settings: Sequence[str], cards: str | None = None) -> int:
    output(examine(files, settings, cards))
    return 0


def examine(files: Sequence[str], settings: Sequence[str], cards: str | None = None) -> str:
    """The whole report. With files or settings, also what they mean; here, or on `cards` that are elsewhere (8x80)."""
    config = load(files, settings) if files or settings else None
    there = None if cards is None else imagined(cards)
    seen = _survey()
    parts = [_rendered(_machine(seen))]
    if there or (config and _trains(config)):
        dealt = dealt_among(config or Config(), there or (seen.cards if isinstance(seen, Survey) else ()))
        parts.append(describe_deal(dealt))
        config = config and dealt.config
    sections = [*_training(config), *_fleet(config)] if config else []
    return "\n\n".join([*parts, *[_rendered(section) for section in sections]])


def _rendered(section: Section) -> str:
    title, facts = section
    return f"{title}\n{indent(render_table((), facts, left=2), '  ')}"


# ------------------------------------------------------------------------------------------------------ this machine


def _machine(seen: Survey | str | None) -> Section:
    facts = [
        ("tailrace", __version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("cores", _cores()),
        ("memory", _memory()),
        ("disk", f"{shutil.disk_usage('.').free / 1e9:,.0f} GB free here"),
        *_gpus(seen),
        *_false_bfloat16(),
        *_sandbox(),
        *_bytecode(),
    ]
    return "this machine", facts + [(name, _package(name, there, missing)) for name, there, missing in PACKAGES]


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{usable}, of which simulations use up to two" if usable > 1 else "1"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):
        return "unknown"
    limit = _container_limit() / 1e9
    return f"{total:,.0f} GB" + (f", {limit:,.0f} GB in this container" if 0 < limit < total else "")


def _container_limit() -> float:
    try:
        return float(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # none, or "max"
        return 0.0


def _survey() -> Survey | str | None:
    """What torch reports of GPUs; why it does not; or nothing, where it is not there or has nothing to look at."""
    if not find_spec("torch") or not device.has_device_files():
        return None
    try:
        return device.survey_apart()
    except ConfigError as error:
        return str(error)


def _gpus(seen: Survey | str | None) -> list[tuple[str, str]]:
    """As torch sees them if it is there, which is what a run could use; or else as their driver does."""
    if seen is None:
        return [("GPUs", _gpus_of_the_driver())]
    if isinstance(seen, str):
        return [("GPUs", seen)]
    if not seen.cards:
        return [("GPUs", f"{_gpus_of_the_driver()}; torch {seen.torch} can use none: {seen.problem}")]
    return [(f"GPU {number}", _described(card, seen)) for number, card in enumerate(seen.cards)]


def _described(card: Card, seen: Survey) -> str:
    triton = "Triton is there" if seen.triton else "no Triton"
    kernels = "fused kernels" if seen.has_kernels(card) else "no fused kernels, so generation is slower"
    return f"{card.name}, {card.memory / 2**30:,.1f} GiB, {card.age}; {triton}: {kernels}"


def _false_bfloat16() -> list[tuple[str, str]]:
    from tailrace.model.device import NARROWER, bfloat16_kills

    if not find_spec("torch") or not bfloat16_kills():
        return []
    return [("bfloat16", f"crashes: this CPU announces AMX without having it; export {NARROWER}")]


def _gpus_of_the_driver() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "none found (no nvidia-smi); simulating and planning need none"
    cards = [line.strip() for line in answer.splitlines() if line.strip()]
    kinds = dict.fromkeys(cards)
    return "; ".join(f"{cards.count(kind)} x {kind}" for kind in kinds) or "none found; simulating needs none"


def _sandbox() -> list[tuple[str, str]]:
    """What holds the programs of a policy that has the tool `python`, and what that does not guarantee."""
    from tailrace.envs.sandbox import layers_here

    return [("sandbox", str(layers_here())), *(("", gap) for gap in layers_here().gaps())]


def _bytecode() -> list[tuple[str, str]]:
    """Only where it costs something."""
    if not sys.dont_write_bytecode:
        return []
    named = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    why = "PYTHONDONTWRITEBYTECODE is set" if named else "Python was started with -B"
    return [("bytecode", f"not kept, because {why}: every process of a run compiles torch anew")]


def _package(name: str, there: str, missing: str) -> str:
    return f"installed: {there}" if find_spec(name) else f"not installed: {missing}"


# ----------------------------------------------------------------------------------------------------- training here


def _training(config: Config) -> Iterator[Section]:
    """What `tailrace train` would do on this machine, if these settings are for training at all."""
    if not _trains(config):
        return
    work, local, emulated = config.workload, config.local, config.rollout.engine == "emulated"
    longest = work.prompt_tokens + work.max_completion_tokens
    samples = f"{counted(work.prompts_per_step, 'prompt')} x {counted(work.group_size, 'sample')}"
    pool = f"{config.rollout.kv_tokens:,} tokens" if config.rollout.kv_tokens else "what memory allows"
    elsewhere = f", {config.local_ranks} of them here" if config.local_ranks < config.trainer.ranks else ""
    ranks = f"a trainer of {config.trainer.ranks} ranks{elsewhere}" if config.trainer.ranks > 1 else "a trainer"
    yield (
        "training here",
        [
            ("model", "none: engines and trainer are emulated" if emulated else _model(config)),
            ("task", "none: prompts are numbers" if emulated else _task(config)),
            *_engine_facts(config),
            ("processes", f"{counted(local.replicas, 'replica')}, {counted(local.relays, 'relay')} and {ranks}"),
            ("a step", f"{samples}, {_mini_batches(config)}"),
            ("KV of a replica", f"{pool}; a sequence may take {longest:,} (max_completion_tokens with the prompt)"),
            *_checkpoint_facts(config),
        ],
    )


def _engine_facts(config: Config) -> list[tuple[str, str]]:
    if config.rollout.engine != "vllm":
        return []
    from tailrace.launch.vllm_python import describe_vllm

    return [("vLLM", describe_vllm(config))]


def _trains(config: Config) -> bool:
    return bool(config.model.path or config.task.name or config.task.data) or config.rollout.engine == "emulated"


def _model(config: Config) -> str:
    from tailrace.model.load import check_path

    if not config.model.path:
        return "missing: write model.path, a Hugging Face model directory"
    return _verdict_of(lambda: check_path(config.model.path), config.model.path)


def _task(config: Config) -> str:
    from tailrace.envs.tasks import build_task

    what = config.task.name or config.task.data
    if not config.task.name and what and not Path(what).exists():
        return f"cannot be used: task.data is {what}, which does not exist"
    return _verdict_of(lambda: build_task(config), what)


def _verdict_of(check: Callable[[], object], good: str) -> str:
    try:
        check()
    except ConfigError as error:
        return f"cannot be used: {error}"
    return good


def _checkpoint_facts(config: Config) -> list[tuple[str, str]]:
    from tailrace.trainer.pace import BYTES_PER_PARAMETER

    size = BYTES_PER_PARAMETER * config.model.parameters
    if not size:
        return []
    settings = config.trainer
    every = f"every {counted(settings.checkpoint_every, 'step')}" if settings.checkpoint_every else _at_least(size)
    return [("checkpoints", f"{size / 1e9:,.2g} GB each, {every}; the newest {settings.keep_checkpoints} are kept")]


def _at_least(size: float) -> str:
    from tailrace.trainer.pace import interval_s

    return f"at steps that are {_seconds(interval_s(size))} apart or more"


# --------------------------------------------------------------------------------------------------------- the fleet


def _fleet(config: Config) -> Iterator[Section]:
    """What a simulation of these settings would be of. Settings for training need not describe a fleet."""
    from tailrace.sim.assumptions import assumptions
    from tailrace.sim.cost_model import check_fit

    if _trains(config) and not config.costs.measured and (why := _no_fleet(config)):
        yield "simulation", [("fleet", why)]
        return
    check_fit(config)
    yield "these settings", _settings_facts(config)
    yield "generation", _generation_facts(config)
    yield "training", _training_facts(config)
    yield "weights", [*_weights_facts(config), *_provisioning_facts(config)]
    yield "schedules", [(kind, _verdict(config, kind)) for kind in SCHEDULES]
    warnings = [*assumptions(config), *_warnings(config)]
    if warnings:
        yield "worth a look", [("-", text) for text in warnings]


def _no_fleet(config: Config) -> str:
    if not config.model.parameters:
        return "the shape of the model is not known; write model.preset to simulate it"
    if config.cluster == Cluster():
        return f"no [cluster] is given; simulate and plan would take {config.size} ({config.cluster.gpu})"
    return ""


def _settings_facts(config: Config) -> list[tuple[str, str]]:
    if config.costs.measured:
        replicas, relays = counted(config.replicas, "replica"), counted(config.hosts, "relay")
        return [("processes", f"{replicas}, {relays} and a trainer, as [costs] measured")]
    model, cluster = config.model, config.cluster
    active = f", {model.active / 1e9:.3g}B active" if model.active < model.parameters else ""
    shape = f"{model.parameters / 1e9:.3g}B parameters{active}, {model.weight_bytes / 1e9:,.1f} GB of weights"
    split = (
        f"all {cluster.gpus:,} in turn"
        if config.colocated
        else f"{config.trainer_gpus:,} train, {config.rollout_gpus:,} generate"
    )
    facts = [
        ("model", f"{model.preset or 'own figures'}: {shape}, {model.kv_bytes_per_token / 1e3:,.0f} kB of KV a token")
    ]
    return facts + (_kinds_facts(config) if config.kinds else _one_kind_facts(config, split))


def _one_kind_facts(config: Config, split: str) -> list[tuple[str, str]]:
    cluster, ways = config.cluster, config.split.tensor_parallel
    idle = config.rollout_gpus - config.replicas * ways
    return [
        ("cluster", f"{cluster.gpus:,} x {cluster.gpu}, {cluster.gpus_per_host} a host: {split}"),
        (
            "replicas",
            f"{config.replicas:,} of {_gpus_each(ways)}" + (f", {counted(idle, 'GPU')} left over" if idle else ""),
        ),
    ]


def _kinds_facts(config: Config) -> list[tuple[str, str]]:
    """A line for each of several kinds of card."""
    trainer = config.trainer_kind
    hosts = config.fleet_hosts
    facts: list[tuple[str, str]] = []
    for kind in config.kinds:
        replicas = sum(host.replicas for host in hosts if host.kind == kind)
        trains = f"{config.trainer_gpus:,} train, " if kind == trainer else ""
        at = f" at {kind.site}" if kind.site else ""
        what = f"{kind.gpus:,}, {kind.gpus_per_host} a host{at}: {trains}{counted(replicas, 'replica')}"
        facts.append((kind.name, f"{what} of {_gpus_each(kind.ways)}"))
    return facts


def _gpus_each(ways: int) -> str:
    return f"{ways} GPU{'s' if ways > 1 else ''} each"


def _generation_facts(config: Config) -> list[tuple[str, str]]:
    from tailrace.lengths import LengthLaw
    from tailrace.sim.measured_costs import cost_model_of

    costs, workload = cost_model_of(config), config.workload
    cap, law = workload.max_completion_tokens, LengthLaw(workload, config.run.seed)
    typical, longest = workload.prompt_tokens + law.mean, workload.prompt_tokens + cap
    per_replica = workload.trajectories_per_step / config.replicas
    room = f"{costs.kv_capacity:,} tokens: {costs.kv_capacity // typical:,.0f} typical"
    step_ms = 1e3 * (costs.decode_base(1) + costs.decode_per_kv_token * typical)
    return [
        ("completions", f"mean {law.mean:,.0f}, median {law.median:,.0f}, p99 {law.p99:,.0f} tokens, cut at {cap:,}"),
        ("KV of a replica", f"{room} or {costs.kv_capacity // longest:,} longest sequences"),
        ("work of a step", f"{workload.trajectories_per_step:,} trajectories, {per_replica:,.1f} a replica"),
        ("roofline batch", f"{costs.roofline:,} sequences; up to there a decode step is bound by reading the weights"),
        ("decode step", f"{step_ms:.1f} ms for one sequence: the longest takes {step_ms / 1e3 * cap:,.0f} s at least"),
    ]


def _training_facts(config: Config) -> list[tuple[str, str]]:
    from tailrace.sim.cost_model import TRAINING_BYTES
    from tailrace.sim.measured_costs import cost_model_of

    step = ("a step", _mini_batches(config))
    if config.costs.measured:
        return [step]
    per_gpu = TRAINING_BYTES * config.model.parameters / config.trainer_gpus
    of = cost_model_of(config).trainer_gpu.memory_bytes
    return [("memory", f"{per_gpu / 1e9:,.1f} of {of / 1e9:,.0f} GB a GPU for weights, gradients and optimiser"), step]


def _mini_batches(config: Config) -> str:
    mini_batches = config.trainer.mini_batches
    return f"{counted(mini_batches, 'mini-batch')} of {config.workload.prompts_per_step / mini_batches:,.4g} groups"


def _weights_facts(config: Config) -> list[tuple[str, str]]:
    from tailrace.sim.measured_costs import cost_model_of

    costs = cost_model_of(config)
    hosts = config.hosts
    return [
        ("push", f"{_seconds(costs.push())}: trainer to master relay, the trainer's only stall"),
        (
            "broadcast",
            f"{_seconds(costs.everywhere())}: to the relays of {counted(hosts, 'host')}, while everybody works",
        ),
        ("pull", f"{_seconds(costs.pull(remote=False))}: relay to replica, when it suits the replica"),
    ]


def _provisioning_facts(config: Config) -> list[tuple[str, str]]:
    """Whether the trainer has to wait for data that is fresh enough; only where both work side by side."""
    from tailrace.sim.provisioning import advice_on, provision_of

    if config.costs.measured or config.colocated or config.schedule.kind in ("sync", "one_step", "stream"):
        return []
    rule = provision_of(config)
    needed = f"{rule.rate:,.0f} tokens/s where {rule.needed:,.0f} are needed"
    holds = f"the trainer need not wait: staleness {rule.staleness} and {needed}"
    return [("provisioning", next(advice_on(rule), holds))]


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{1e3 * value:,.0f} ms"


def _verdict(config: Config, kind: str) -> str:
    from tailrace.sim.cost_model import check_fit

    try:
        check_fit(with_values(config, {"schedule.kind": kind}))
    except ConfigError as error:
        return f"cannot run: {error}"
    return "can run" + (", as these settings say" if kind == config.schedule.kind else "")


def _warnings(config: Config) -> Iterator[str]:
    from tailrace.lengths import LengthLaw
    from tailrace.model.advice import advice
    from tailrace.sim.measured_costs import cost_model_of

    yield from advice(config)
    costs, workload = cost_model_of(config), config.workload
    law = LengthLaw(workload, config.run.seed)
    group = workload.prompt_tokens + workload.group_size * law.mean
    longest = workload.prompt_tokens + workload.max_completion_tokens
    if group > costs.kv_capacity:
        yield f"a typical group ({group:,.0f} tokens) is larger than the KV of a replica: its samples will take turns"
    elif costs.kv_capacity < 4 * longest:
        few = costs.kv_capacity // longest
        yield f"a replica holds only {few} of the longest sequences: raise split.tensor_parallel"
    if config.replicas < 2 and config.schedule.kind == "trajectory":
        yield "there is one replica only: repack has nowhere to move anything"
    if workload.trajectories_per_step < config.replicas:
        yield f"a step has fewer trajectories than there are replicas ({config.replicas:,}): some stay idle"
    if law.p99 >= workload.max_completion_tokens and workload.lengths.law != "fixed":
        yield "more than 1 % of completions are cut at workload.max_completion_tokens"
    if not config.costs.measured and not config.kinds and config.rollout_gpus % config.split.tensor_parallel:
        yield "the GPUs that generate are no multiple of split.tensor_parallel: the rest stays unused"
