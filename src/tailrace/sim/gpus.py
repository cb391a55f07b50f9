"""A catalogue of GPUs: what a card holds, moves and computes, and what an hour of it costs.

Figures are the makers' published ones: dense (without sparsity) bf16 with fp32 accumulation, decimal gigabytes, and
bandwidth in one direction. What a program attains of them is the cost model's affair, but for one thing that differs by
card: the share of peak that large matrix products reach. It is of the table of maximum achievable matmul FLOPS in
stas00/ml-engineering (bf16, the same program on every card); cards that are not in it are taken to be like an H100.
Cards without a switch between them talk over PCIe. T4 and V100 have no bf16: their row has fp16.

Prices are round figures of public clouds on demand, per GPU-hour. They differ widely by place, time and contract:
override them (`cluster.cards`) before drawing conclusions about money.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from tailrace.config.errors import ConfigError
from tailrace.config.kinds import OF_A_KIND, kinds_of
from tailrace.config.spelling import near
from tailrace.config.tree import Cluster

PCIE3 = 12e9  # what copies attain of x16, one direction
PCIE4 = 25e9
PCIE5 = 50e9
MATMUL_H100 = 0.803


class Gpu(NamedTuple):
    """One card. Bytes, bytes per second, FLOP per second, dollars."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: float  # dense bf16
    interconnect_bytes_per_s: float  # to the other GPUs of its host, per GPU and direction
    host_bytes_per_s: float  # to and from the host's memory
    dollars_per_hour: float
    matmul: float = MATMUL_H100  # share of `flops` that large matrix products reach

    @property
    def flops_like_h100(self) -> float:
        """What its arithmetic is worth, where programs attain as much of it as of an H100's."""
        return self.flops * self.matmul / MATMUL_H100


GPUS: tuple[Gpu, ...] = (
    # name, memory, memory bandwidth, dense bf16, interconnect, host link, price, share of peak in matrix products
    Gpu("A100-40GB", 40e9, 1.555e12, 312e12, 300e9, PCIE4, 1.5, 0.869),
    Gpu("A100-80GB", 80e9, 2.039e12, 312e12, 300e9, PCIE4, 2.0, 0.869),
    Gpu("A800", 80e9, 2.039e12, 312e12, 200e9, PCIE4, 1.8, 0.869),  # an A100 with NVLink cut to 400 GB/s both ways
    Gpu("H100", 80e9, 3.35e12, 989e12, 450e9, PCIE5, 3.0),  # SXM
    Gpu("H100-PCIe", 80e9, 2.0e12, 756e12, PCIE5, PCIE5, 2.5),
    Gpu("H800", 80e9, 3.35e12, 989e12, 200e9, PCIE5, 2.5),  # an H100 with NVLink cut to 400 GB/s both ways
    Gpu("H20", 96e9, 4.0e12, 148e12, 450e9, PCIE5, 1.5),
    Gpu("H200", 141e9, 4.8e12, 989e12, 450e9, PCIE5, 3.5),
    Gpu("B200", 180e9, 8.0e12, 2.25e15, 900e9, PCIE5, 5.0, 0.776),
    Gpu("GB200", 186e9, 8.0e12, 2.5e15, 900e9, 450e9, 6.0, 0.729),  # reaches its host over NVLink-C2C
    Gpu("B300", 288e9, 8.0e12, 2.25e15, 900e9, PCIE5, 6.0, 0.786),
    Gpu("MI300X", 192e9, 5.3e12, 1.307e15, 448e9, PCIE5, 2.5, 0.511),
    Gpu("MI325X", 256e9, 6.0e12, 1.307e15, 448e9, PCIE5, 3.0, 0.601),
    Gpu("MI355X", 288e9, 8.0e12, 2.5e15, 537e9, PCIE5, 4.5, 0.626),
    Gpu("L4", 24e9, 0.3e12, 121e12, PCIE4, PCIE4, 0.7),
    Gpu("L40S", 48e9, 0.864e12, 362e12, PCIE4, PCIE4, 1.5),
    Gpu("A10G", 24e9, 0.6e12, 70e12, PCIE4, PCIE4, 1.0),
    Gpu("RTX-4090", 24e9, 1.008e12, 165e12, PCIE4, PCIE4, 0.5),
    Gpu("RTX-5090", 32e9, 1.792e12, 209.5e12, PCIE5, PCIE5, 0.8),
    Gpu("RTX-3090", 24e9, 0.936e12, 71e12, PCIE4, PCIE4, 0.3),
    Gpu("RTX-A6000", 48e9, 0.768e12, 155e12, PCIE4, PCIE4, 0.7),
    Gpu("T4", 16e9, 0.32e12, 65e12, PCIE3, PCIE3, 0.4),
    Gpu("V100", 32e9, 0.9e12, 125e12, 150e9, PCIE3, 1.0),  # SXM2
)

_ALIASES = {
    "a100": "A100-80GB",
    "a100sxm": "A100-80GB",
    "a10080gb": "A100-80GB",
    "a100sxm480gb": "A100-80GB",  # as the driver says it: "NVIDIA A100-SXM4-80GB"
    "a100sxm440gb": "A100-40GB",
    "h100sxm": "H100",
    "h100sxm5": "H100",
    "h10080gb": "H100",
    "h10080gbhbm3": "H100",
    "h800sxm": "H800",
    "h200sxm": "H200",
    "h200141gb": "H200",
    "v10032gb": "V100",
    "v100sxm232gb": "V100",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
    "3090": "RTX-3090",
    "a6000": "RTX-A6000",
}
FIGURES = {  # of a table [cluster.cards.NAME]: the field, and its unit
    "memory_gbytes": ("memory_bytes", 1e9),
    "memory_gbytes_per_s": ("memory_bytes_per_s", 1e9),
    "tflops": ("flops", 1e12),
    "interconnect_gbytes_per_s": ("interconnect_bytes_per_s", 1e9),
    "host_gbytes_per_s": ("host_bytes_per_s", 1e9),
    "dollars_per_hour": ("dollars_per_hour", 1.0),
}
LARGEST = 1e9  # of any figure; more is a slip
_MAKERS = ("nvidia", "amd", "geforce", "instinct", "tesla")


def rollout_card(cluster: Cluster) -> Gpu:
    return find(cluster.gpu, cluster.cards)


def trainer_card(cluster: Cluster) -> Gpu:
    first = next((kind.name for kind in kinds_of(cluster.cards, 1, 1)), cluster.gpu)
    return find(cluster.trainer_gpu or first, cluster.cards)


def find(name: str, cards: Mapping[str, Any] | None = None) -> Gpu:
    """The card of that name, with the figures in `cards` (`cluster.cards`) in place of the catalogue's; case,
    separators and the maker's name do not matter."""
    key = _plain(name)
    given = {_plain(each): figures for each, figures in (cards or {}).items()}
    if key in given:
        return _with_figures(name, _ROWS.get(key) or _row_named_in(given[key]), given[key])
    if key in _ROWS:
        return _with_figures(name, _ROWS[key], given.get(_plain(_ROWS[key].name), {}))
    meant = _meant(key)
    hint = f"; did you mean {meant}?" if meant else "."
    raise ConfigError(
        f"There is no GPU {name!r} in the catalogue{hint} Write one of "
        f"{', '.join(gpu.name for gpu in GPUS)}, or describe it in a table [cluster.cards.{name}]."
    )


def _meant(key: str) -> str | None:
    """The card that a name begins, misspells, or has the letter o in the place of a zero of."""
    begun = {gpu.name for plain, gpu in _ROWS.items() if key and plain.startswith(key)}
    if len(begun) == 1:
        return begun.pop()
    close = near(key, _ROWS) or key.replace("o", "0")
    return _ROWS[close].name if close in _ROWS else None


def _row_named_in(table: Any) -> Gpu | None:
    """Which card of the catalogue a kind with a name of its own is: H20 at one place and at another."""
    return find(table["gpu"]) if isinstance(table, dict) and "gpu" in table else None


def _with_figures(name: str, known: Gpu | None, figures: Any) -> Gpu:
    """The catalogue's card with other figures, or one that has all of them."""
    where = f"cluster.cards.{name}"
    if not isinstance(figures, dict):
        raise ConfigError(f"{where} wants a table of figures; write [{where}] and below it dollars_per_hour = 2.0")
    given = {key: value for key, value in cast("dict[str, Any]", figures).items() if key not in OF_A_KIND}
    values = dict([_figure(where, key, value) for key, value in given.items()])
    if known is not None:
        return known._replace(**values) if values else known
    missing = [key for key, (field, _) in FIGURES.items() if field not in values]
    if missing:
        meant = _meant(_plain(name))
        hint = f"{meant}, if you mean that, or " if meant else ""
        raise ConfigError(
            f"{where} is not in the catalogue and lacks {', '.join(missing)}; write {hint}all figures of it"
        )
    return Gpu(name, **values)


def _figure(where: str, key: str, value: Any) -> tuple[str, float]:
    if key not in FIGURES:
        raise ConfigError(f"{where}.{key} is no figure of a card; there are {', '.join((*OF_A_KIND, *FIGURES))}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise ConfigError(f"{where}.{key} is {value!r}; write a number above 0 and below {LARGEST:,.0f}")
    field, unit = FIGURES[key]
    return field, value * unit


def _plain(name: str) -> str:
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for maker in _MAKERS:
        plain = plain.removeprefix(maker)
    return plain


_ROWS = {_plain(gpu.name): gpu for gpu in GPUS}
_ROWS |= {alias: _ROWS[_plain(name)] for alias, name in _ALIASES.items()}
