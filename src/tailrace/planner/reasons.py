"""Why a plan says what it says: sentences made of figures, from the simulated results and the theory."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.config import Config
from tailrace.planner.balance import Theory
from tailrace.sim.result import Result

SHORT_TAIL = 2.0  # longest over mean
MOSTLY_TRAINING = 0.6  # of a synchronous step
LITTLE = 0.1
NOTED = 0.03
MUCH_DROPPED = 0.02


def reasons_for(
    config: Config, helps: bool, sync: Result, best: Result | None, theory: Theory | None, refusal: str
) -> Iterator[str]:
    """`config` and `sync` are of the baseline, `best` is the best asynchronous result, `refusal` why there is none."""
    if best is None:
        yield f"No asynchronous schedule can run: {refusal or 'none was within the budget of simulations'}."
    yield _synchronous_step(config, sync)
    yield from _why_it_helps(config, sync, best, theory) if helps and best else _why_not(config, sync, best, theory)


def _synchronous_step(config: Config, sync: Result) -> str:
    trains, generates, waits = _shares(sync)
    if not config.colocated:
        return (
            f"In a synchronous step of {sync.step_s:.1f} s the trainer works for {trains:.0%} of the time and the "
            f"replicas for {1 - sync.rollout_idle:.0%}."
        )
    return (
        f"Of a synchronous step of {sync.step_s:.0f} s, the GPUs train for {trains:.0%}, generate for {generates:.0%} "
        f"and stand idle for {waits:.0%}."
    )


def _shares(sync: Result) -> tuple[float, float, float]:
    """Training, generating, and neither: colocated engines are idle while their GPUs train."""
    trains = 1.0 - sync.trainer_idle
    generates = min(1.0 - sync.rollout_idle, sync.trainer_idle)
    return trains, generates, max(0.0, 1.0 - trains - generates)


def _why_it_helps(config: Config, sync: Result, best: Result, theory: Theory | None) -> Iterator[str]:
    if theory and theory.longest_over_mean >= SHORT_TAIL:
        yield (
            f"The longest completion of a step is {theory.longest_over_mean:.1f} times the mean, and a synchronous "
            "round waits for it while batches shrink; without rounds, replicas stay full."
        )
    if theory and theory.batch_g > 1.2 * theory.batch_g_sync:
        yield (
            f"With GPUs of its own, a replica decodes up to {theory.batch_g:.0f} samples together "
            f"instead of {theory.batch_g_sync:.0f}."
        )
    if config.colocated and sync.step_s < config.efficiency.switch_s / NOTED:
        lost = f"{config.efficiency.switch_s:.0f} of its {sync.step_s:.0f} s"
        yield f"A synchronous step loses {lost} to its GPUs' change of roles; larger steps would hide that."
    yield (
        f"The trainer then waits for {best.trainer_idle:.0%} of the time and the replicas for {best.rollout_idle:.0%}; "
        f"what is trained on is {best.staleness.mean:.1f} versions old on average, {best.staleness.max} at most."
    )
    lost = best.dropped / max(1, best.dropped + best.trained)
    if lost > MUCH_DROPPED:
        yield (
            f"{lost:.0%} of the groups become too stale and are dropped, the longest first: a larger "
            "schedule.max_staleness would keep them, if the algorithm bears it."
        )


def _why_not(config: Config, sync: Result, best: Result | None, theory: Theory | None) -> Iterator[str]:
    trains, _, waits = _shares(sync)
    if trains >= MOSTLY_TRAINING:
        why = "it takes as many GPU-seconds either way: moving generation to other GPUs takes these from the trainer"
        yield f"Training dominates ({trains:.0%}), and {why if config.colocated else 'it takes as long either way'}."
    if theory and theory.longest_over_mean < SHORT_TAIL:
        yield (
            f"The longest completion of a step is only {theory.longest_over_mean:.1f} times the mean: there is no tail "
            "to wait for."
        )
    if waits < LITTLE:
        yield f"Only {waits:.0%} of the synchronous step is idle, and idle time is what asynchrony wins back."
    if config.schedule.max_staleness == 0:
        yield "schedule.max_staleness is 0, so nothing may be generated ahead of the weights; 1 or more would allow it."
    if best:
        yield (
            f"The best asynchronous config ({best.schedule}) reaches {best.tokens_per_s:,.0f} tokens/s against "
            f"{sync.tokens_per_s:,.0f}: its trainer waits for {best.trainer_idle:.0%}, its replicas for "
            f"{best.rollout_idle:.0%} of the time."
        )
