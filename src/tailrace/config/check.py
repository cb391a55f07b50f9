"""Rules between settings that need no hardware to judge. Each rule looks at one thing and says what to write instead.

`load` calls `check` on every Config; code that builds a Config by hand may call it too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from tailrace.config.errors import refuse
from tailrace.config.fields import BadValueError, accept, fields, read
from tailrace.config.kinds import GpuKind, bad_tables
from tailrace.config.tree import HELD_OUT, Config, Filters, Groups, Workload

Rule = Callable[[Config], Iterator[str]]

GIVE_A_MODEL = (
    "write model.path, a Hugging Face model directory to train; or, to simulate one, model.preset = 'qwen2.5-7b', "
    "model.hf_config or the model's own figures"
)
SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEVICE = re.compile(r"(cpu|cuda(:\d{1,3})?)?")
SET_FOR_VLLM = {  # and the setting that is for it
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "rollout.precision",
    "max_num_seqs": "rollout.max_running",
    "max_num_batched_tokens": "rollout.prefill_tokens",
    "num_gpu_blocks_override": "rollout.kv_tokens",
    "gpu_memory_utilization": "rollout.memory",
    "data_parallel_size": "local.replicas",
    "seed": "",
    "load_format": "",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "disable_log_stats": "",
}


def check(config: Config) -> None:
    """Raise ConfigError with the first thing that cannot work and the number of the others."""
    refuse(list(_bad_values(config)))  # first alone: rules may rely on every value being in its range
    refuse([problem for rule in RULES for problem in rule(config)])


def _bad_values(config: Config) -> Iterator[str]:
    for key in fields():
        try:
            accept(key, read(config, key))
        except BadValueError as error:
            yield str(error)
    yield from bad_tables(config.cluster.cards, config.cluster.sites)


def _model_is_complete(config: Config) -> Iterator[str]:
    if config.costs.measured:
        return  # nothing is reckoned from its shape
    missing = [name for name in ("parameters", "layers", "hidden", "heads") if not getattr(config.model, name)]
    if len(missing) == 4:
        if not config.model.path:  # what is trained need not say its shape
            yield f"no model is given; {GIVE_A_MODEL}"
    elif missing:
        yield f"model.{missing[0]} is missing; write it, or a model.preset that has it"


def _model_heads_fit(config: Config) -> Iterator[str]:
    model = config.model
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        yield f"model.heads is {model.heads}, which {model.kv_heads} kv_heads cannot share; write a divisor of heads"
    if model.active_parameters > model.parameters > 0:
        yield "model.active_parameters is more than model.parameters; it is the part that one token uses"
    if not model.bytes_per_weight or not model.bytes_per_kv:
        yield "model.bytes_per_weight and model.bytes_per_kv are above 0; write 2 for bfloat16 or 1 for fp8"


def _kinds_make_a_fleet(config: Config) -> Iterator[str]:
    cluster, kinds = config.cluster, config.kinds
    if not kinds:
        if any("gpus" in table for table in _card_tables(config)):
            yield "all kinds of [cluster.cards] have gpus = 0; write how many there are of one"
        return
    named, counted = {kind.name for kind in kinds}, sum(kind.gpus for kind in kinds)
    if cluster.trainer_gpu and cluster.trainer_gpu not in named:
        yield f"cluster.trainer_gpu is '{cluster.trainer_gpu}', of which there are none; write {_one_of(named)}"
    if cluster.gpu not in named:
        yield f"cluster.gpu is '{cluster.gpu}', but [cluster.cards] say which kinds there are; leave it out"
    if cluster.gpus != counted:
        yield f"cluster.gpus is {cluster.gpus}, but [cluster.cards] have {counted} GPUs; leave it out"
    if config.split.colocated:
        yield "split.colocated is true, but kinds of card do not take turns at training and generating; leave it out"


def _sites_have_links(config: Config) -> Iterator[str]:
    """But for one of several, where everybody else's link leads to. A link of a site where nothing is, is a typo."""
    links = config.cluster.sites
    at = {table["site"] for table in _card_tables(config) if table.get("site")}
    for site in links:
        if at and site not in at:
            yield f"[cluster.sites.{site}] is the link of a site at which no card is; write {_one_of(at)}"
    unlinked = {kind.site: kind.name for kind in config.kinds if kind.site not in links}
    far = [site for site in unlinked if site]
    if len(unlinked) > 1 and far:
        yield (
            f"cluster.cards.{unlinked[far[0]]}.site is '{far[0]}', of which no link is known; "
            f"write [cluster.sites.{far[0]}] and below it gbytes_per_s = 0.1"
        )


def _card_tables(config: Config) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", table) for table in config.cluster.cards.values() if isinstance(table, dict)]


def _one_of(names: Iterable[str]) -> str:
    return " or ".join(f"'{name}'" for name in sorted(names))


def _kinds_are_used(config: Config) -> Iterator[str]:
    """Each by the trainer or by whole replicas."""
    trainer = config.trainer_kind
    if trainer is None:
        return
    for kind in config.kinds:
        yield from _replica_of_a_kind(config, f"cluster.cards.{kind.name}.tensor_parallel is {kind.ways}", kind)
    if config.trainer_gpus > trainer.gpus:
        yield f"split.trainer_gpus is {config.trainer_gpus} but there are {trainer.gpus} {trainer.name}; write fewer"
    elif config.cluster.gpus == 1:
        yield f"one GPU cannot both train and generate; write cluster.cards.{trainer.name}.gpus = 2 or more"
    elif not config.replicas:
        yield f"split.trainer_gpus = {config.trainer_gpus} leaves no replica's worth of GPUs; write fewer"


def _replica_of_a_kind(config: Config, given: str, kind: GpuKind) -> Iterator[str]:
    if kind.ways > kind.gpus_per_host:
        yield f"{given}, more than a host of {kind.gpus_per_host} GPUs; write {kind.gpus_per_host} or less"
    if config.model.heads and config.model.heads % kind.ways:
        choices = ", ".join(map(str, _divisors(config.model.heads)))
        yield f"{given}, which does not divide the model's heads; write one of {choices}"


def _gpus_are_split(config: Config) -> Iterator[str]:
    if config.colocated or config.kinds:
        return
    gpus, trainer = config.cluster.gpus, config.trainer_gpus
    setting = "split.trainer_gpus" if config.split.trainer_gpus else "split.trainer_share"
    if trainer > gpus:
        yield f"split.trainer_gpus is {trainer} but cluster.gpus is {gpus}; write fewer, or more cluster.gpus"
    elif trainer == gpus == 1:
        yield "cluster.gpus is 1, too few for a trainer beside a replica; write 2 or more, or split.colocated = true"
    elif trainer == gpus:
        yield f"{setting} gives the trainer all {gpus} GPUs and leaves none to generate; write less"


def _replica_fits(config: Config) -> Iterator[str]:
    ways, per_host = config.split.tensor_parallel, config.cluster.gpus_per_host
    if config.kinds:
        return
    if 0 < config.rollout_gpus < ways:
        yield (
            f"split.tensor_parallel is {ways} but only {config.rollout_gpus} GPUs generate, so no replica fits; "
            f"write {config.rollout_gpus} or less, or give the trainer fewer"
        )
    if ways > per_host and ways % per_host:
        yield (
            f"split.tensor_parallel is {ways}, neither within a host of {per_host} GPUs nor whole hosts; "
            f"write at most {per_host} or a multiple of it"
        )
    if config.model.heads and config.model.heads % ways:
        choices = ", ".join(map(str, _divisors(config.model.heads)))
        yield f"split.tensor_parallel is {ways}, which does not divide the model's heads; write one of {choices}"


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _trainer_divides(config: Config) -> Iterator[str]:
    ways, gpus = config.split.trainer_parallel, config.trainer_gpus
    if gpus % ways:
        yield f"split.trainer_parallel is {ways}, which does not divide the trainer's {gpus} GPUs; write a divisor"
    tensor_ways, stages = config.split.trainer_tensor_parallel, config.split.trainer_pipeline_parallel
    if ways % tensor_ways:
        yield (
            f"split.trainer_tensor_parallel is {tensor_ways}, which does not divide split.trainer_parallel = {ways}; "
            f"the tensor ways are part of those"
        )
    elif ways % (tensor_ways * stages):
        yield (
            f"split.trainer_pipeline_parallel is {stages}; times split.trainer_tensor_parallel = {tensor_ways} it does "
            f"not divide split.trainer_parallel = {ways}, of which both are part"
        )


def _batch_divides(config: Config) -> Iterator[str]:
    mini_batches, prompts = config.trainer.mini_batches, config.workload.prompts_per_step
    if mini_batches > prompts:
        yield f"trainer.mini_batches is {mini_batches}, more than workload.prompts_per_step; write {prompts} or less"
    survivors, size = config.groups.min_survivors, config.workload.group_size
    if survivors > size:
        yield f"groups.min_survivors is {survivors}, more than workload.group_size; write {size} or less"


def _filters_are_used(config: Config) -> Iterator[str]:
    """Settings of filters that are off would be silently without effect."""
    changed = [name for name in Filters.__struct_fields__ if getattr(config.filters, name) != getattr(Filters(), name)]
    if changed and config.groups.filter != "all":
        yield (
            f"filters.{changed[0]} is used with groups.filter = 'all' alone, and it is '{config.groups.filter}'; "
            "leave it out, or write groups.filter = 'all'"
        )
    if config.groups.max_filtered != Groups().max_filtered and config.groups.filter == "none":
        yield "groups.max_filtered is used with a groups.filter alone; leave it out, or write groups.filter = 'all'"
    if config.groups.filter != "none" and config.workload.group_size == 1 and config.trainer.advantage != "beta":
        yield (
            f"groups.filter is '{config.groups.filter}', but with workload.group_size = 1 no sample can be better than "
            "the others of its group, and every group would be left out; write larger groups, or groups.filter = 'none'"
        )
    if config.groups.filter == "all" and config.trainer.advantage == "gae":
        yield "groups.filter is 'all', but with trainer.advantage 'gae' all groups teach; write groups.filter = 'none'"


def _dual_clip_is_above_the_ratio_of_fresh_data(config: Config) -> Iterator[str]:
    if 0 < config.trainer.dual_clip <= 1:
        yield (
            f"trainer.dual_clip is {config.trainer.dual_clip:g}, so that bad tokens of fresh data would teach nothing; "
            "write a value above 1, such as 3, or 0 for none"
        )


def _lengths_follow_a_law(config: Config) -> Iterator[str]:
    lengths = config.workload.lengths
    yield from LAWS[lengths.law](config.workload)
    if lengths.file and lengths.law != "empirical":
        yield f"workload.lengths.file is not read under law '{lengths.law}'; write workload.lengths.law = 'empirical'"
    if (lengths.tail_share or lengths.tail_alpha) and lengths.law != "mixture":
        yield f"workload.lengths has a tail, but its law is '{lengths.law}'; write workload.lengths.law = 'mixture'"
    if lengths.drift_per_step <= -1:
        yield "workload.lengths.drift_per_step leaves no length at all; write a value above -1"


def _lognormal(workload: Workload) -> Iterator[str]:
    lengths = workload.lengths
    given = [name for name in ("median", "mean", "sigma", "p99") if getattr(lengths, name)]
    if len(given) != 2:
        yield f"workload.lengths has {_listed(given)}; {_two_figures(given)}"
    elif 0 < lengths.mean < lengths.median and workload.max_completion_tokens >= 2 * lengths.median:
        # The mean is taken after the cap. Only a cap below twice the median can pull it under the median.
        yield "workload.lengths.mean is below the median, which no log-normal law has; write a mean of median or more"
    elif lengths.p99 and lengths.p99 <= max(lengths.median, lengths.mean):
        yield "workload.lengths.p99 is not above the median and the mean; write a larger p99"


def _listed(names: list[str]) -> str:
    return " and ".join(names) or "no figures"


def _two_figures(given: list[str]) -> str:
    if len(given) > 2:
        return "two determine the law, so set the others to 0"
    return "give two of median, mean, sigma and p99, for example median = 2000 and sigma = 1"


def _mixture(workload: Workload) -> Iterator[str]:
    lengths = workload.lengths
    yield from _lognormal(workload)
    if not 0 < lengths.tail_share < 1:
        yield "workload.lengths.tail_share is the part of the mixture in the tail; write a value between 0 and 1"
    if lengths.tail_alpha <= 1:
        alpha = f"workload.lengths.tail_alpha = {lengths.tail_alpha:g}"
        yield f"a Pareto tail with {alpha} has no finite mean; write a value above 1"


def _empirical(workload: Workload) -> Iterator[str]:
    if not workload.lengths.file:
        yield "workload.lengths.law is 'empirical' but there is no workload.lengths.file; write the path of the samples"


def _fixed(workload: Workload) -> Iterator[str]:
    given = [figure for figure in (workload.lengths.mean, workload.lengths.median) if figure]
    if not given:
        yield "workload.lengths.law is 'fixed' but there is no length; write workload.lengths.mean"
    elif len(given) == 2:
        yield "workload.lengths has a mean and a median, but its law is 'fixed'; set one of them to 0"


LAWS: dict[str, Callable[[Workload], Iterator[str]]] = {
    "lognormal": _lognormal,
    "mixture": _mixture,
    "empirical": _empirical,
    "fixed": _fixed,
}


def _turns_fit(config: Config) -> Iterator[str]:
    turns = config.workload.turns
    if turns.mean > turns.maximum:
        yield f"workload.turns.mean is {turns.mean:g} but workload.turns.maximum is {turns.maximum}; raise the maximum"


def _some_data_is_fresh_enough(config: Config) -> Iterator[str]:
    """Data that is always older than the bound would be dropped for ever."""
    schedule, bound = config.schedule, config.schedule.max_staleness
    ahead = min(1, bound) if schedule.steps_ahead is None else int(schedule.steps_ahead)  # what `stream` lags behind
    if schedule.kind == "one_step" and bound < 1:
        yield "schedule.max_staleness is 0, but 'one_step' trains one version behind; write 1, or the kind 'sync'"
    if schedule.kind == "stream" and bound < ahead:
        yield f"schedule.max_staleness is {bound}, below steps_ahead, so 'stream' never trains; write {ahead} or more"
    behind = 1 if schedule.kind == "one_step" else ahead if schedule.kind == "stream" else 0
    unpublished = behind + schedule.publish_every - 1
    if schedule.publish_every > 1 and bound < unpublished:
        yield f"schedule.max_staleness is {bound}, too few until the next publish; write {unpublished} or more"


def _restarts_back_off(config: Config) -> Iterator[str]:
    health = config.health
    if health.backoff_max_s < health.backoff_s:
        yield f"health.backoff_max_s is below health.backoff_s; write {health.backoff_s:g} or more"


def _strangers_can_be_checked(config: Config) -> Iterator[str]:
    checkers, kind = config.strangers.checkers, config.schedule.kind
    if not checkers:
        return
    if not config.local.listen:
        yield "strangers.checkers is set, but nobody can join; write local.listen, an address of this host"
    if not config.local.is_auto and config.local.replicas < checkers:
        yield f"strangers.checkers are replicas of this host; write local.replicas = {checkers} or more"
    if kind in ("sync", "one_step", "stream"):
        yield f"with schedule.kind = '{kind}' a stranger could hold up everybody; write 'trajectory' or 'adaptive'"
    if config.rollout.engine == "vllm":
        yield "strangers.checkers score with the native engine; write rollout.engine = 'native'"
    needed = (config.schedule.max_staleness + 1) * config.model.weight_bytes / 1e9
    if 0 < config.relay.quota_gbytes < needed:
        yield f"strangers are checked under max_staleness + 1 versions; write relay.quota_gbytes = {needed:.2g} or more"


def _evaluations_are_of_published_versions(config: Config) -> Iterator[str]:
    every, published = config.eval.every, config.schedule.publish_every
    for key, steps in (("eval.every", every), ("run.steps", config.run.steps)):
        if every and steps % published:
            yield f"{key} is {steps}, but every {published}th version is published; write a multiple of {published}"


def _evaluation_is_used(config: Config) -> Iterator[str]:
    settings = config.eval
    for name in ("keep_best", "patience"):
        value = getattr(settings, name)
        if value and not settings.every:
            yield f"eval.{name} is {value}, but eval.every is 0, so nothing is evaluated by then; write 1 or more"
    if settings.temperature == 0 and settings.samples > 1:
        yield (
            f"eval.temperature is 0, so that all {settings.samples} samples of a prompt (eval.samples) are the same; "
            "write eval.samples = 1, or a temperature"
        )
    for name, path in settings.sets.items():
        if not isinstance(path, str) or not SET_NAME.fullmatch(name) or name == HELD_OUT:
            yield f"eval.sets.{name} is {path!r}; write name = 'data.jsonl', with a name of letters, digits, - and _"
    if settings.by and settings.by not in (HELD_OUT, *settings.sets):
        yield f"eval.by is '{settings.by}', which is no set; there are {', '.join((HELD_OUT, *settings.sets))}"


def _devices_have_names(config: Config) -> Iterator[str]:
    for setting, device in (("rollout.device", config.rollout.device), ("trainer.device", config.trainer.device)):
        if not DEVICE.fullmatch(device):
            yield f'{setting} is "{device}", which is no device; write "cpu", "cuda" or "cuda:0", or leave it empty'


def _cards_are_named_once(config: Config) -> Iterator[str]:
    """Numbers of cards belong to a role that computes on cards, and are given in one way."""
    for name, section in (("rollout", config.rollout), ("trainer", config.trainer)):
        given = f"{name}.cards is {list(section.cards)}"
        if section.cards and section.engine == "emulated":
            yield f'{given}, but {name}.engine is "emulated", which uses no GPU; leave {name}.cards out'
        elif section.cards and section.device not in ("", "cuda"):
            yield f'{given}, but {name}.device is "{section.device}"; write "cuda", or leave {name}.cards out'
    if config.trainer.ranks > 1 and ":" in config.trainer.device:
        yield (
            f'trainer.device is "{config.trainer.device}", one GPU for {config.trainer.ranks} trainer.ranks; '
            'write trainer.device = "cuda"'
        )


def _emulation_is_whole(config: Config) -> Iterator[str]:
    generated, trained = config.rollout.engine, config.trainer.engine
    if (generated == "emulated") != (trained == "emulated"):
        yield (
            f"rollout.engine is '{generated}' and trainer.engine is '{trained}', which do not fit; "
            "write 'emulated' for both or for none"
        )


def _vllm_has_a_python(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "vllm" and not rollout.python:
        yield "rollout.engine is 'vllm', which has a Python of its own; write rollout.python = '/path/to/bin/python'"
    for key in rollout.vllm:
        if key in SET_FOR_VLLM:
            instead = SET_FOR_VLLM[key]
            advice = f"write {instead} instead" if instead else "it has to be what Tailrace gives it, so leave it out"
            yield f"rollout.vllm.{key} is not yours to set; {advice}"


def _relays_listen(config: Config) -> Iterator[str]:
    listen = config.relay.listen
    try:
        network = ipaddress.ip_network(listen, strict=False)
    except ValueError:
        yield f'relay.listen is "{listen}", which is no address; write "127.0.0.1", or a network such as "10.0.0.0/8"'
        return
    if network.network_address.is_unspecified:
        yield f'relay.listen is "{listen}", which is everywhere; write the network of your hosts, such as "10.0.0.0/8"'


def _controller_listens(config: Config) -> Iterator[str]:
    listen = config.local.listen
    try:
        everywhere = bool(listen) and ipaddress.ip_address(listen).is_unspecified
    except ValueError:
        yield f'local.listen is "{listen}", which is no address; write one of this host, such as "10.0.0.1"'
        return
    if everywhere:
        yield f'local.listen is "{listen}", which is everywhere; write one address of this host, such as "10.0.0.1"'


def _others_bring_what_is_missing(config: Config) -> Iterator[str]:
    local, ranks = config.local, config.trainer.ranks
    if config.local_ranks > ranks:
        yield f"local.ranks is {local.ranks}, more than trainer.ranks; write {ranks} or less, or leave it out"
    if local.listen:
        return
    advice = "write local.listen, an address of this host, so that other machines can bring"
    if not local.replicas:
        yield f"local.replicas is 0, and nobody can join; {advice} some, or write 1 or more"
    if config.local_ranks < ranks:
        yield f"local.ranks is {local.ranks} of trainer.ranks = {ranks}, and nobody can join; {advice} the rest"


def _ranks_meet_on_a_trusted_network(config: Config) -> Iterator[str]:
    interface, listen = config.trainer.interface, config.local.listen
    if 0 < config.local_ranks < config.trainer.ranks and not interface:
        yield (
            f"local.ranks is {config.local_ranks} of trainer.ranks = {config.trainer.ranks}, so ranks are on several "
            "machines, where gloo and NCCL neither authenticate nor encrypt; write trainer.interface, the interface "
            'or network of a network that you trust, such as "eth1" or "10.0.0.0/24"'
        )
    if "/" in interface and _network(interface) is None:
        yield f'trainer.interface is "{interface}", which is no network; write one such as "10.0.0.0/24", or "eth1"'
    if interface and listen and _is_loopback(interface) and not _is_loopback(listen):
        yield f'trainer.interface is "{interface}", the loopback, which no other machine reaches; write their network'


def _nixl_has_a_trusted_network(config: Config) -> Iterator[str]:
    relay = config.relay
    if relay.transport == "nixl" and not relay.interface:
        yield (
            'relay.transport is "nixl", which neither authenticates nor encrypts; write relay.interface, the interface '
            'or network of a network that you trust, such as "ib0" or "10.0.0.0/24", or relay.transport = "tcp"'
        )
    if "/" in relay.interface and _network(relay.interface) is None:
        yield f'relay.interface is "{relay.interface}", which is no network; write one such as "10.0.0.0/24", or "ib0"'


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _is_loopback(text: str) -> bool:
    network = _network(text)
    return text == "lo" or (network is not None and network.is_loopback)


RULES: tuple[Rule, ...] = (
    _relays_listen,
    _controller_listens,
    _others_bring_what_is_missing,
    _ranks_meet_on_a_trusted_network,
    _nixl_has_a_trusted_network,
    _devices_have_names,
    _cards_are_named_once,
    _emulation_is_whole,
    _vllm_has_a_python,
    _model_is_complete,
    _model_heads_fit,
    _kinds_make_a_fleet,
    _sites_have_links,
    _kinds_are_used,
    _gpus_are_split,
    _replica_fits,
    _trainer_divides,
    _batch_divides,
    _filters_are_used,
    _dual_clip_is_above_the_ratio_of_fresh_data,
    _lengths_follow_a_law,
    _turns_fit,
    _some_data_is_fresh_enough,
    _restarts_back_off,
    _strangers_can_be_checked,
    _evaluations_are_of_published_versions,
    _evaluation_is_used,
)
