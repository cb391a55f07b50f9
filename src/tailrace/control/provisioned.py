"""The provisioning rule, checked while a run goes on: would the trainer wait with what has been measured of late?

`measured` puts together what control knows; nothing is decided by it. The wall-clock driver writes a line to its log
when the rule stops holding, and when it holds again (`ProvisioningWatch`).
"""

from __future__ import annotations

from tailrace.control.provisioning import Provisioning
from tailrace.control.state import Context

SURE = 3  # steps in a row that must say the same


def measured(context: Context) -> Provisioning | None:
    """In tokens that are sampled. None: too little is known yet, or replicas wait for the trainer by design."""
    ledger, training, live = context.ledger, context.training, [r for r in context.fleet.replicas.values() if r.live]
    known = live and all(one.rate for one in live) and training.train_s and ledger.finished_samples
    if context.traits.rounds or not known:
        return None
    tokens = (ledger.finished_tokens - ledger.finished_prompts) / ledger.finished_samples
    return Provisioning(
        work=tokens * context.config.workload.trajectories_per_step,
        rate=sum(one.rate for one in live),
        step_s=training.train_s,
        broadcast_s=context.relays.publish_s,
        generate_s=ledger.group_s,
        staleness=context.config.schedule.max_staleness,
        publish_every=context.config.schedule.publish_every,
        picks=len(context.mini_batch_sizes) if context.traits.streams else 1,
    )


class ProvisioningWatch:
    """Says once that the rule has stopped holding, and once that it holds again."""

    def __init__(self) -> None:
        self._holds = True
        self._differs = 0  # steps in a row

    def look(self, rule: Provisioning | None) -> str:
        """After every step; a sentence, if there is something new to say."""
        self._differs = self._differs + 1 if rule is not None and rule.holds != self._holds else 0
        if rule is None or self._differs < SURE:
            return ""
        self._holds, self._differs = rule.holds, 0
        return "the trainer need not wait any more, by the provisioning rule" if rule.holds else _why(rule)


def _why(rule: Provisioning) -> str:
    if not rule.keeps_up:
        return (
            f"the trainer waits: replicas sample {rule.rate:,.0f} tokens/s, and it takes "
            f"{rule.work / rule.step_s:,.0f}; more replicas would help"
        )
    if not rule.link_keeps_up:
        return (
            f"the trainer waits: a version takes {rule.broadcast_s:,.1f} s to be everywhere, and is published every "
            f"{rule.publish_every * rule.step_s:,.1f} s; schedule.publish_every = {rule.least_publish_every} would help"
        )
    return (
        f"the trainer waits: the first groups of a version are done {rule.arrives_s:,.1f} s after its step, and a step "
        f"takes {rule.step_s:,.1f} s; schedule.max_staleness = {rule.least_staleness} would help"
    )
