"""Prompts that teach nothing, decided before, during and after generation.

before   a prompt whose last visits were all right, or all wrong, is skipped when its turn comes, most of the time, and
         so is one of which there is a group already (`histories.py`). Once the data have come round within a step, such
         prompts are visited only as far as the next two steps need them
during   a group starts with few samples, unless the last visit was useful. Once their rewards differ it gets all of its
         samples; as long as all are wrong it gets a few more; once all are right it is stopped: the others are never
         started
after    a group whose samples all got the same reward is left out, and another one takes its place (`groups.py`)

What is started is finished: nothing is cancelled for being slow, and whether a group gets more samples depends on
rewards alone, so short answers have no advantage. Among wrong answers, those that are trained on are the first by
number, which was given to them before they had a length.
"""

from __future__ import annotations

from math import ceil

from tailrace.control.histories import Outcome
from tailrace.control.ledger import Group
from tailrace.control.state import Context
from tailrace.protocol import SkipPrompts
from tailrace.types import RIGHT_ABOVE, Prompt, TrajectoryId

MOST_FETCHED = 16  # times as many prompts are asked for as without skipping


def open_groups(context: Context, count: int, round: int = 0) -> list[Group]:
    """Open as many groups, for the prompts whose turn it is; fewer where so many are skipped that none is left."""
    ledger, opened, skipped = context.ledger, list[Group](), list[Prompt]()
    size = context.config.workload.group_size
    while len(opened) < count and len(ledger.pool) and not _may_wait(context):
        if _skips(context, ledger.pool.first()):
            skipped.append(ledger.skip_prompt())
        else:
            opened.append(ledger.open_group(context.now, size, round, _first_samples(context, ledger.pool.first())))
    if skipped:
        streaks = [context.state.history.streak(prompt.row) for prompt in skipped]
        context.send(SkipPrompts(tuple([prompt.id for prompt in skipped]), tuple(streaks)))
    return opened


def _first_samples(context: Context, prompt: Prompt) -> int:
    """All where the last visit was useful: this one will be too, most likely, and is sooner complete."""
    was_useful = context.state.history.was_useful(prompt.row)
    return context.config.workload.group_size if was_useful else context.config.first_samples


def _may_wait(context: Context) -> bool:
    """All prompts have come up in this step, and enough is under way for it and for the next one: with enough for this
    one alone the trainer would wait as long as a group takes, and replicas would have nothing to do meanwhile."""
    came_round = context.config.groups.skips and context.state.history.rounds > 0
    return came_round and not context.traits.rounds and context.lacks <= -context.config.workload.prompts_per_step


def _skips(context: Context, prompt: Prompt) -> bool:
    config, under_way = context.config, context.ledger.rows.get(prompt.row, 0)
    return config.groups.skips and context.state.history.skips(config.run.seed, prompt, under_way, config.filters)


def prompts_to_fetch(context: Context, wanted: int) -> int:
    """As many that about the wanted number is left of them."""
    return min(MOST_FETCHED * wanted, ceil(wanted / max(0.01, context.state.history.visited_share)))


def extend(context: Context, group: Group) -> None:
    """Start more samples of a group that has not begun all of them, unless its outcome is settled or not known yet."""
    count = _more(context, group)
    if count:
        context.ledger.add_samples(group, count)
        context.more_work = True


def _more(context: Context, group: Group) -> int:
    left = group.size - len(group.samples)
    outcome = outcome_of(context, group)
    if outcome == "useful":
        return left
    if group.unfinished or _is_settled(context, group, outcome):
        return 0
    return min(left, context.config.filters.add_samples)


def _is_settled(context: Context, group: Group, outcome: Outcome | None) -> bool:
    """All right; or all wrong, and so it was at the last visit."""
    return outcome == "easy" or (outcome == "hard" and context.state.history.streak(group.prompt.row) < 0)


def outcome_of(context: Context, group: Group) -> Outcome | None:
    """What its finished samples say of it; None: they are too few. Where there are no rewards, all are worth having."""
    rewards = context.ledger.rewards(group)
    given = [reward for reward in rewards if reward is not None]
    if len(given) < len(rewards) or (given and not context.config.groups.same(given)):
        return "useful"
    if len(given) < context.config.groups.min_survivors:
        return None
    return "easy" if sum(given) > RIGHT_ABOVE * len(given) else "hard"


def note(context: Context, group: Group) -> Outcome:
    """A group has closed: what it turned out to be counts for later visits of its prompt."""
    outcome = outcome_of(context, group) or "hard"
    remembered = context.config.filters.rows if context.config.groups.skips else 0
    context.state.history.note(group.prompt.row, outcome, remembered)
    return outcome


def note_dropped(context: Context, group: Group) -> None:
    """Its prompt comes up again. If its first samples are done, what they say counts, or a prompt that takes long and
    teaches nothing would be visited and dropped again and again."""
    if context.config.groups.skips and len(context.ledger.survivors(group)) >= context.config.first_samples:
        note(context, group)


def teaches(context: Context, group: Group) -> bool:
    """Whether anything can be learned from a group that has closed."""
    outcome = note(context, group)
    found = outcome == "useful" or (outcome == "easy" and context.config.trainer.advantage == "beta")
    context.state.history.note_end(outcome, found)
    return found


def why_hopeless(context: Context) -> str:
    """Why there is no use in going on, if there is none: that nothing is left to learn, or nothing can be, would
    otherwise look like a run that takes long."""
    easy, hard = context.state.history.easy_in_vain, context.state.history.hard_in_vain
    most = context.config.groups.max_filtered
    if not most or easy + hard < most:
        return ""
    found = f"the samples were all right in {easy:,} of them and all wrong in {hard:,}"
    asked = "are the prompts too easy or too hard for this model, or does the reward not tell answers apart?"
    return f"none of the last {easy + hard:,} groups (groups.max_filtered) has anything to teach: {found}; {asked}"


def left_out(context: Context, group: Group) -> frozenset[TrajectoryId]:
    """Wrong samples of a group that are not trained on: there are many for each right one."""
    groups, most = context.config.groups, context.config.filters.wrong_per_right
    done = [context.ledger.samples[id] for id in context.ledger.survivors(group)]
    if groups.filter != "all" or not most or any(one.reward is None for one in done):
        return frozenset()
    wrong = [one.id for one in done if (one.reward or 0.0) <= RIGHT_ABOVE]
    right = len(done) - len(wrong)
    kept = max(ceil(most * right), groups.min_survivors - right) if right else len(wrong)
    return frozenset(wrong[kept:])
