"""Blocks and plans: nothing leaks, nothing is freed twice, and the load is exactly what running sequences need."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from buffers import job_of
from tailrace.engines.paged import BlockPool
from tailrace.engines.scheduler import BatchPlan, Scheduler, Sequence

BLOCK = 4
LONGEST = 40


def scheduler(blocks: int = 64, prefill_tokens: int = 16, max_running: int = 100) -> Scheduler:
    return Scheduler(blocks, BLOCK, prefill_tokens, max_running)


def sequence(
    id: int, group: int = 0, prompt: int = 9, more: int = 0, end: int = LONGEST, prefix: int | None = None
) -> Sequence:
    """Prompts of different groups differ, unless they have the same prefix."""
    first = 1000 * (group if prefix is None else prefix)
    tokens = tuple(range(first, first + prompt)) + tuple(range(id, id + more))
    return Sequence(job_of(id, group, tokens, prompt, end - len(tokens)), end)


def compute(subject: Scheduler) -> BatchPlan:
    """A step as the engine does it; the token that is sampled does not matter here."""
    plan = subject.plan()
    done = [chunk.sequence for chunk in plan.chunks if chunk.samples]
    for chunk in plan.chunks:
        assert chunk.end <= len(chunk.sequence.blocks) * BLOCK
        subject.computed(chunk)
    for each in done:
        each.tokens.append(7)
        if len(each.tokens) >= each.end:
            subject.finished(each)
    subject.check()
    return plan


def test_the_lowest_block_is_always_taken_first() -> None:
    pool = BlockPool(5)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.release([2, 0])
    assert pool.take(3) == [0, 2, 4]
    assert (pool.free, pool.needed) == (0, 5)


def test_a_block_is_free_only_when_nobody_needs_or_keeps_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.need([block])
    pool.keep([block])
    pool.release([block])
    pool.release([block])
    assert (pool.free, pool.needed) == (1, 0)
    pool.drop([block])
    assert pool.free == 2


def test_the_prompt_of_a_group_is_prefilled_once_and_its_blocks_counted_once() -> None:
    subject = scheduler(prefill_tokens=100)
    for id in range(4):
        subject.submit(sequence(id, prompt=11))
    first = compute(subject)
    assert [(chunk.sequence.id, chunk.length) for chunk in first.chunks] == [(0, 11)]
    second = compute(subject)
    assert [(chunk.sequence.id, chunk.start, chunk.length) for chunk in second.chunks] == [
        (0, 11, 1),
        (1, 10, 1),
        (2, 10, 1),
        (3, 10, 1),
    ]
    source = subject.running[0].blocks[2]
    assert second.copies == [(source, each.blocks[2]) for each in subject.running[1:]]
    assert subject.stats().kv_tokens == BLOCK * (2 + 4)  # two shared blocks, one of each sample


def test_a_prompt_that_begins_like_another_takes_its_whole_blocks() -> None:
    subject = scheduler(prefill_tokens=100)
    subject.submit(sequence(0, group=0, prompt=11, prefix=5))
    subject.submit(sequence(1, group=1, prompt=11, prefix=5))
    compute(subject)
    subject.submit(sequence(2, group=2, prompt=10, prefix=5))
    subject.submit(sequence(3, group=3, prompt=10, prefix=6))
    plan = compute(subject)
    assert {chunk.sequence.id: chunk.length for chunk in plan.chunks} == {0: 1, 1: 1, 2: 2, 3: 10}
    assert subject.running[2].blocks[:2] == subject.running[1].blocks[:2]
    subject.drop_kv()
    assert subject.pool.free == subject.pool.size


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    subject = scheduler(prefill_tokens=8)
    subject.submit(sequence(1, group=1, prompt=3))
    compute(subject)
    subject.submit(sequence(2, group=2, prompt=20))
    counts = [[(chunk.sequence.id, chunk.length) for chunk in compute(subject).chunks] for _ in range(4)]
    assert counts == [[(1, 1), (2, 8)], [(1, 1), (2, 8)], [(1, 1), (2, 4)], [(1, 1), (2, 1)]]


def test_the_youngest_loses_its_kv_when_the_pool_is_full_and_goes_on_later() -> None:
    subject = scheduler(blocks=6, prefill_tokens=100)
    old, young = sequence(1, group=1, prompt=8, end=24), sequence(2, group=2, prompt=7, end=16)
    for each in (old, young):
        subject.submit(each)
    while len(young.tokens) == 7 or young in subject.running:
        compute(subject)
    assert subject.running == [old]
    assert (young.blocks, young.cached) == ([], 0)
    while subject.stats().running or subject.stats().waiting:
        compute(subject)
    assert (len(old.tokens), len(young.tokens)) == (24, 16)


def test_the_next_turn_computes_only_what_is_new() -> None:
    subject = scheduler(prefill_tokens=100)
    subject.submit(sequence(1, prompt=6, end=12))
    while subject.stats().running or subject.stats().waiting:
        compute(subject)
    kept = subject.turns[1]
    assert subject.stats().kv_tokens == 0
    subject.submit(Sequence(job_of(1, 0, (*kept.tokens, 7, 50, 51), 6, 5), 19))
    (chunk,) = compute(subject).chunks
    assert (chunk.start, chunk.length) == (11, 3)
    assert 1 not in subject.turns


def test_a_turn_that_does_not_continue_the_last_starts_anew() -> None:
    subject = scheduler(prefill_tokens=100)
    subject.submit(sequence(1, prompt=6, end=12))
    while subject.stats().running or subject.stats().waiting:
        compute(subject)
    subject.forget(1)
    assert subject.pool.free == subject.pool.size
    subject.submit(sequence(1, group=3, prompt=6, end=12))
    (chunk,) = compute(subject).chunks
    assert (chunk.start, chunk.length) == (0, 6)


def test_kept_turns_give_way_oldest_first() -> None:
    subject = scheduler(blocks=10, prefill_tokens=100)
    for id in (1, 2):
        subject.submit(sequence(id, group=id, prompt=8, end=12))
    while subject.stats().running or subject.stats().waiting:
        compute(subject)
    assert list(subject.turns) == [1, 2]
    subject.submit(sequence(3, group=3, prompt=24, end=26))
    compute(subject)
    assert list(subject.turns) == [2]


def test_dropped_kv_is_recomputed_in_the_same_order() -> None:
    subject = scheduler(prefill_tokens=100)
    for id in range(3):
        subject.submit(sequence(id, group=id))
    compute(subject)
    subject.drop_kv()
    subject.check()
    assert [each.id for each in subject.waiting] == [0, 1, 2]
    assert subject.pool.free == subject.pool.size
    assert [chunk.length for chunk in compute(subject).chunks] == [10, 10, 10]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 11), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("withdraw"), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("forget"), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("drop"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, blocks=st.integers(10, 40), prefill=st.integers(1, 30), max_running=st.integers(1, 8))
def test_blocks_are_conserved_whatever_happens(
    actions: list[tuple[str, int, int]], blocks: int, prefill: int, max_running: int
) -> None:
    """Every step checks the pool's books; at the end everything finishes and every block comes back."""
    subject = scheduler(blocks, prefill, max_running)
    for action, number, extra in actions:
        if action == "submit" and not any(s.id == number for s in (*subject.running, *subject.waiting)):
            group = number // 4
            end = 5 * group + extra + 3
            subject.submit(sequence(number, group, prompt=1 + 5 * group, more=extra, end=end, prefix=group // 2))
        elif action == "step":
            for _ in range(number):
                compute(subject)
                needed = {block for each in subject.running for block in each.blocks}
                assert subject.stats().kv_tokens == BLOCK * len(needed)
        elif action == "withdraw":
            subject.withdraw(number)
        elif action == "forget":
            subject.forget(number)
        elif action == "drop":
            subject.drop_kv()
        subject.check()
    for _ in range(1000):
        if not compute(subject).chunks:
            break
    assert not subject.running
    assert not subject.waiting
    for id in range(12):
        subject.forget(id)
    assert subject.pool.free == blocks - len(set(subject.prefix_cache.values()))
    subject.drop_kv()
    assert subject.pool.free == blocks
