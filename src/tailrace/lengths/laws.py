"""Length distributions ("laws"), fitted to published figures.

A law is the quantile function of a distribution over standard normals: it maps normals to lengths in tokens, before
capping and rounding. Larger normals give longer completions, so correlated normals give correlated lengths, whatever
the law. `draw.py` samples the normals; here the parameters are solved for the figures in the configuration.

`mean` is the mean after the cap, because papers publish observed means. `median` and `p99` are quantiles, which the cap
does not change; a p99 above the cap is that of the uncapped distribution. `sigma` is the standard deviation of the
logarithm of the log-normal body. In a mixture, median, mean and p99 describe the whole and not only its body.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Lengths

Array = np.ndarray
Law = Callable[[Array], Array]
Shape = Callable[[float], Array]  # sigma -> log lengths at the grid's normals, for a body with median 1

# The normals at which laws are tabulated and integrated. No run samples a normal beyond 8.5.
_GRID = np.linspace(-8.5, 8.5, 8193)
_WEIGHTS = np.exp(-_GRID * _GRID / 2)
_WEIGHTS /= _WEIGHTS.sum()
_BELOW = np.array([math.erfc(-z / math.sqrt(2)) / 2 for z in _GRID.tolist()])  # P(normal < grid)
_ABOVE = _BELOW[::-1]
_HAZARD = np.where(_BELOW < 0.5, -np.log1p(-np.minimum(_BELOW, 0.5)), -np.log(_ABOVE))  # -log P(normal > grid)

Z_P90 = NormalDist().inv_cdf(0.90)
Z_P99 = NormalDist().inv_cdf(0.99)

_LONGEST = 100.0  # as a logarithm: above any cap

_SIGMAS = np.geomspace(0.01, 6.0, 96).tolist()


def mean_of(law: Law, cap: int) -> float:
    """Mean of the law after clipping to 1 and the cap."""
    return float(_WEIGHTS @ np.clip(law(_GRID), 1, cap))


def quantile_of(law: Law, cap: int, z: float) -> float:
    """The Phi(z) quantile after clipping."""
    return float(np.clip(law(np.array([z])), 1, cap)[0])


def fixed(lengths: Lengths, cap: int) -> Law:
    """Every completion has the same length, given as `mean` or as `median`."""
    given = [value for value in (lengths.mean, lengths.median) if value]
    if len(given) != 1:
        raise ConfigError("The fixed law needs one length: write either lengths.mean or lengths.median.")
    value = given[0]
    if value > cap:
        raise ConfigError(_above_cap("fixed length", value, cap))
    return lambda normals: np.full(normals.shape, value)


def empirical(values: list[float]) -> Law:
    """The empirical distribution: every recorded value is equally likely."""
    ordered = np.sort(np.array(values, dtype=float))
    last = len(ordered) - 1

    def law(normals: Array) -> Array:
        rank = np.interp(normals, _GRID, _BELOW) * len(ordered)
        return ordered[np.minimum(rank.astype(np.int64), last)]

    return law


def lognormal(lengths: Lengths, cap: int) -> Law:
    """A log-normal with two of median, mean, sigma and p99."""
    if lengths.tail_share or lengths.tail_alpha:
        raise ConfigError('lengths.tail_share and tail_alpha need a tail: write lengths.law = "mixture".')
    location, sigma = _fit(lengths, cap)
    return lambda normals: np.exp(np.minimum(location + sigma * normals, _LONGEST))


def mixture(lengths: Lengths, cap: int) -> Law:
    """A log-normal body, and a share of Pareto lengths that start at the body's 90th percentile."""
    share, alpha = lengths.tail_share, lengths.tail_alpha
    if not 0 < share < 1:
        raise ConfigError(
            f"A mixture with lengths.tail_share = {share:g} has one part only: write a share between 0 and 1, "
            'such as 0.05, or lengths.law = "lognormal".'
        )
    if alpha <= 1:
        raise ConfigError(
            f"A Pareto tail with lengths.tail_alpha = {alpha:g} has no finite mean: "
            "write an exponent above 1, such as 1.5."
        )
    location, sigma = _fit(lengths, cap)
    logs = location + _tailed_shape(share, alpha)(sigma)
    return lambda normals: np.exp(np.interp(normals, _GRID, logs))


def _shape_of(lengths: Lengths) -> Shape:
    if lengths.law == "mixture":
        return _tailed_shape(lengths.tail_share, lengths.tail_alpha)
    return lambda sigma: sigma * _GRID


def _tailed_shape(share: float, alpha: float) -> Shape:
    """The mixture has no closed quantile function: tabulate P(length > x) and invert it at P(normal > z).

    Both are compared as -log of the probability, which is precise at the lower end and in the far tail.
    """

    def shape(sigma: float) -> Array:
        start = sigma * Z_P90
        # At the last normal of the grid -log P is about 40; the tail alone has reached that 40 / alpha above its start.
        last = max(9 * sigma, start + 40 / alpha)
        logs = np.concatenate((np.linspace(-9 * sigma, start, 6000), np.linspace(start, last, 4000)[1:]))
        below = (1 - share) * np.interp(logs / sigma, _GRID, _BELOW)
        body = (1 - share) * np.interp(logs / sigma, _GRID, _ABOVE)
        tail = share * np.exp(-alpha * np.maximum(logs - start, 0))
        hazard = np.where(logs < start, -np.log1p(-below), -np.log(body + tail))
        return np.interp(_HAZARD, hazard, logs)

    return shape


def _fit(lengths: Lengths, cap: int) -> tuple[float, float]:
    """The log of the body's median, and sigma, that reproduce the two figures given."""
    figures = _two_figures(lengths, cap)
    shape = _shape_of(lengths)
    if "sigma" in figures:
        sigma = figures.pop("sigma")
        ((name, value),) = figures.items()
        return _locate(shape(sigma), name, value, cap), sigma
    if "mean" in figures:
        mean = figures.pop("mean")
        ((name, value),) = figures.items()
        return _spread_for_mean(shape, name, value, mean, cap)
    return _spread_for_quantiles(shape, figures["median"], figures["p99"], cap)


def _two_figures(lengths: Lengths, cap: int) -> dict[str, float]:
    figures = {name: getattr(lengths, name) for name in ("median", "mean", "sigma", "p99")}
    given = {name: value for name, value in figures.items() if value}
    if len(given) != 2:
        written = ", ".join(given) if given else "none"
        raise ConfigError(
            f"A {lengths.law} law of lengths takes exactly two of median, mean, sigma and p99, and {written} "
            f"{'is' if len(given) < 2 else 'are'} given: write two, such as lengths.median and lengths.sigma."
        )
    for name in ("median", "mean"):
        if given.get(name, 0) >= cap:
            raise ConfigError(_above_cap(name, given[name], cap))
    if "median" in given and "p99" in given and given["median"] >= given["p99"]:
        raise ConfigError(
            f"lengths.median = {given['median']:g} is not below lengths.p99 = {given['p99']:g}: "
            'write a larger p99, or lengths.law = "fixed".'
        )
    return given


def _above_cap(what: str, value: float, cap: int) -> str:
    return (
        f"A {what} of {value:g} tokens is not possible with max_completion_tokens = {cap}: "
        f"raise max_completion_tokens above {value:g}, or write a smaller {what}."
    )


def _locate(logs: Array, name: str, value: float, cap: int) -> float:
    """The shift of the log lengths that reproduces the figure."""
    if name == "median":
        return math.log(value) - float(np.interp(0.0, _GRID, logs))
    if name == "p99":
        return math.log(value) - float(np.interp(Z_P99, _GRID, logs))
    return _root(lambda shift: _capped_mean(logs + shift, cap) - value, -50.0, 50.0)


def _capped_mean(logs: Array, cap: int) -> float:
    return float(_WEIGHTS @ np.exp(np.minimum(logs, math.log(cap))))


def _spread_for_mean(shape: Shape, name: str, value: float, mean: float, cap: int) -> tuple[float, float]:
    """The smallest sigma that reproduces both the quantile and the capped mean.

    The capped mean is not monotonic in sigma (a wider distribution is clipped more), so the first crossing is searched.
    """

    def excess(sigma: float) -> float:
        logs = shape(sigma)
        return _capped_mean(logs + _locate(logs, name, value, cap), cap) - mean

    seen = [excess(_SIGMAS[0])]
    for low, high in pairwise(_SIGMAS):
        seen.append(excess(high))
        if seen[-2] * seen[-1] <= 0:
            sigma = _root(excess, low, high)
            return _locate(shape(sigma), name, value, cap), sigma
    raise ConfigError(
        f"No such law has lengths.{name} = {value:g} and lengths.mean = {mean:g} under max_completion_tokens = {cap}: "
        f"write a mean between {min(seen) + mean:.0f} and {max(seen) + mean:.0f}, or change the cap."
    )


def _spread_for_quantiles(shape: Shape, median: float, p99: float, cap: int) -> tuple[float, float]:
    wanted = math.log(p99 / median)

    def excess(sigma: float) -> float:
        middle, high = np.interp([0.0, Z_P99], _GRID, shape(sigma)).tolist()
        return high - middle - wanted

    if excess(_SIGMAS[0]) > 0 or excess(_SIGMAS[-1]) < 0:
        raise ConfigError(
            f"No such law has lengths.median = {median:g} and lengths.p99 = {p99:g}: "
            "write a p99 of 2 to 50 times the median, or a smaller tail_share."
        )
    sigma = _root(excess, _SIGMAS[0], _SIGMAS[-1])
    return _locate(shape(sigma), "median", median, cap), sigma


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Bisection."""
    rising = function(high) > 0
    for _ in range(60):
        middle = (low + high) / 2
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2
