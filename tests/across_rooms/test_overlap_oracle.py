"""The second opinion on overlapped and local updates, held against closed forms, exactly."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from random import Random

import pytest

from tests.helpers.rounds import (
    METHODS,
    WHOLE,
    Alike,
    Bucket,
    Case,
    Passes,
    Played,
    Step,
    Version,
    co2,
    ddp,
    ddp_each,
    ddp_in_buckets,
    local_round,
    play,
    played_co2,
    played_local_round,
    played_step,
    recurrence,
    through_equal_buckets,
    updates_of,
    zero_1,
    zero_1_in_buckets,
)

ALIKE, UNLIKE = 3000, 1500
ZERO = Fraction(0)


def drawn(random: Random, least: int = 0, most: int = 12) -> Fraction:
    """Draw a time."""
    under = random.choice([1, 2, 3, 7])
    return Fraction(random.randint(least * under, most * under), under)


def parts(random: Random, whole: Fraction, updates: int) -> tuple[Fraction, Fraction, Fraction]:
    """Cut the duration of a communication into a reduce-scatter, one of its updates, and a gather."""
    first, second = sorted(random.randint(0, 6) for _ in range(2))
    return whole * first / 6, whole * (second - first) / 6 / updates, whole * (6 - second) / 6


def case_of(random: Random, times: Sequence[Fraction], whole: Fraction, method: str, block: int) -> Case[Fraction]:
    """Draw the rest of a case whose communications last so long."""
    scatter, update, gather = parts(random, whole, len(updates_of(method, 0)))
    slowest = random.randrange(len(times))
    shards = [update if i == slowest else update * random.randint(0, 2) / 2 for i in range(len(times))]
    updates = random.randint(1, 3)
    warm_up = random.randint(0, updates - 1) if method == "dpu" else 0
    return Case(method, times, scatter, shards, gather, block, updates, warm_up)


@cache
def alike() -> list[tuple[Case[Fraction], Played[Fraction], Alike[Fraction]]]:
    """Play drawn cases whose workers are alike; in half of them communications end with a block, or nearly so."""
    random, found = Random(22), []
    for _ in range(ALIKE):
        time, workers, block = drawn(random, 1), random.randint(1, 3), random.randint(1, 3)
        whole = drawn(random)
        if random.random() < 0.5:
            whole = max(ZERO, block * time * random.randint(0, 4) + Fraction(random.randint(-1, 1), 1000))
        case = case_of(random, [time] * workers, whole, random.choice(METHODS), block)
        found.append((case, play(case), Alike.of(case)))
    return found


@cache
def unlike() -> list[tuple[list[Fraction], Case[Fraction], Played[Fraction]]]:
    """Play drawn cases without a warm-up whose workers have times of their own."""
    random, found = Random(23), []
    for _ in range(UNLIKE):
        times = [drawn(random, 1, 6) for _ in range(random.randint(2, 4))]
        case = case_of(random, times, drawn(random), random.choice(METHODS), random.randint(1, 2))
        if not case.warm_up:
            found.append((times, case, play(case)))
    return found


@pytest.mark.slow
def test_the_draw_has_every_side_of_every_rule() -> None:
    """Blocks that end as a communication does, just before it and just after it; all methods; warm-ups."""
    sides = {
        (case.method, (case.duration / (case.block * case.time(0, 0, 0))).denominator == 1) for case, _, _ in alike()
    }
    assert sides == {(method, tie) for method in METHODS for tie in (True, False)}
    assert {form.blocks for _, _, form in alike()} >= {1, 2, 3, 4, 5}
    assert {case.warm_up for case, _, _ in alike()} == {0, 1, 2}
    assert {case.method for _, case, _ in unlike()} == set(METHODS)
    assert sum(case.duration == 0 for _, case, _ in unlike()) > 3


def test_an_interval_has_so_many_blocks_and_the_stream_idles_for_the_rest() -> None:
    """k = max(1, ceil(D / (a C))); the interval is k a C, and the stream idles for k a C - D of it."""
    for case, played, form in alike():
        later = played.rounds[case.warm_up :]
        for before, after in pairwise(later):
            assert after.counts == (form.blocks * case.block,) * case.workers
            for i in range(case.workers):
                assert after.posted[i] - before.posted[i] == form.interval
        for first, second in pairwise(later[:-1]):
            assert second.span[0] - first.span[1] == form.stream_idle >= 0


def test_an_update_comes_after_one_interval_or_two_and_has_their_samples() -> None:
    """The first one has a seed instead of an interval."""
    for case, played, form in alike():
        ends = [each.span[1] for each in played.rounds[:-1] if not each.updates[0].makes.estimate]
        assert len(ends) == case.updates
        assert all(after - before == form.period for before, after in pairwise(ends[case.warm_up :]))
        found = [sum(played.entering(update)) for update in range(case.updates)]
        warm = [case.workers * case.block] * case.warm_up
        rest = [form.per_update] * (case.updates - case.warm_up - 1)
        assert found == [*warm, form.first_update, *rest]


def test_the_run_ends_a_boundary_after_its_last_update_and_throws_an_interval_away() -> None:
    for case, played, form in alike():
        assert played.end == form.end
        assert sum(played.rounds[-1].counts) == form.thrown_away == sum(played.entering(case.updates))


def test_a_warm_up_is_steps_of_zero_1() -> None:
    """Then a whole block is the seed."""
    for case, played, _ in alike():
        workers = [Passes(ZERO, case.time(i, 0, 0)) for i in range(case.workers)]
        step = zero_1(workers, case.block, case.reduce_scatter, max(case.update), case.gather)
        assert played.spans[: case.warm_up] == [
            (w * step.length + case.block * case.time(0, 0, 0), (w + 1) * step.length) for w in range(case.warm_up)
        ]
        assert len(played.rounds[case.warm_up].starts[0]) == (case.block if case.warm_up else 1)


@pytest.mark.parametrize("k", range(1, 6))
def test_the_update_rate_falls_in_jumps(k: int) -> None:
    """At D = k a C it goes from 1/(2 k a C) to 1/(2 (k+1) a C); the sample rate stays."""
    time, block, little = Fraction(5, 3), 2, Fraction(1, 10**9)
    for late, blocks in ((-little, k), (ZERO, k), (little, k + 1)):
        played = play(Case("acco", [time] * 2, k * block * time, [late] * 2, ZERO, block, updates=3))
        first, second = (played.rounds[r].span[1] for r in (1, 3))
        assert second - first == 2 * blocks * block * time
        assert sum(played.entering(1)) / (second - first) == 2 / time


def stretches(played: Played[Fraction], worker: int) -> list[tuple[Fraction, Fraction]]:
    """List the micro-batches of a worker by start and end."""
    case = played.case
    return [
        (start, start + case.time(worker, r, number))
        for r, each in enumerate(played.rounds)
        for number, start in enumerate(each.starts[worker])
    ]


def test_a_compute_stream_idles_in_the_warm_up_alone() -> None:
    """The rate of gradients is the sum of 1 / C_i."""
    every = [played for _, played, _ in alike()[:600]] + [played for _, _, played in unlike()]
    for played in every:
        case, last = played.case, played.rounds[-1]
        for i in range(case.workers):
            passes = stretches(played, i)
            idle = [after - before for (_, before), (after, _) in pairwise(passes) if after != before]
            assert (passes[0][0], passes[-1][1]) == (ZERO, last.posted[i])
            assert idle == [case.duration] * (case.warm_up if case.duration else 0)
            assert len(passes) * case.time(i, 0, 0) == last.posted[i] - sum(idle)


def est(number: int) -> Version:
    return Version(number, estimate=True)


# by interval, from the seed (-1) on: what it reads, what its gradients enter, and their lag there
TABLE: dict[str, Callable[[int], tuple[Version, int, int]]] = {
    "dpu": lambda r: (Version(max(r, 0)), r + 1, 0 if r < 0 else 1),
    "wp": lambda r: (est(r + 1) if r >= 0 else Version(0), r + 1, 0),
    "acco": lambda r: (Version(0) if r < 0 else est((r + 1) // 2) if r % 2 else Version(r // 2), (r + 1) // 2, 0),
}


@pytest.mark.parametrize("method", METHODS)
def test_intervals_read_what_the_table_says(method: str) -> None:
    played = play(Case(method, [Fraction(2), Fraction(3)], Fraction(3), [Fraction(2)] * 2, Fraction(3), updates=6))
    found = [(each.reads, each.enters, each.lag) for each in played.rounds]
    assert found == [TABLE[method](r) for r in range(-1, len(found) - 1)]


def test_a_warm_up_has_no_lag_and_its_seed_has_none() -> None:
    played = play(Case("dpu", [2, 3], 3, [2] * 2, 3, updates=6, warm_up=3))
    assert [each.reads.number for each in played.rounds] == [0, 1, 2, 3, 3, 4, 5]
    assert [each.lag for each in played.rounds] == [0, 0, 0, 0, 1, 1, 1]


def test_every_gradient_enters_one_update_of_theta_or_is_thrown_away() -> None:
    """An update starts from a version that exists; one that makes a theta starts from the theta before it."""
    for _, case, played in unlike():
        there = {Version(0)}
        taken: list[int] = []
        for each in played.rounds[:-1]:
            for update in each.updates:
                assert update.base in there and not update.base.estimate
                there.add(update.makes)
                taken += [] if update.makes.estimate else update.rounds
        assert taken == list(range(case.communications))
        assert {Version(t) for t in range(case.updates + 1)} <= there
        computed = sum(len(stretches(played, i)) for i in range(case.workers))
        assert sum(sum(played.entering(u)) for u in range(case.updates + 1)) == computed


def test_an_estimate_starts_where_the_next_update_does() -> None:
    for method, communications in (("acco", range(0, 12, 2)), ("wp", range(12))):
        for r in communications:
            estimate, real = updates_of(method, r)[-1], updates_of(method, r + 1)[0]
            assert estimate.makes.estimate and estimate.base == real.base


def test_events_follow_the_recurrence() -> None:
    """A worker posts at its first boundary after its last posting at which the communication has ended."""
    for times, case, played in unlike():
        posts = recurrence(times, case.block, case.duration, case.communications)
        assert [each.posted for each in played.rounds] == posts
        begun = [max(each) for each in posts[:-1]]
        assert played.spans == [(start, start + case.duration) for start in begun]


def test_rounds_last_a_communication_and_at_most_a_block() -> None:
    """D <= S_r+1 - S_r <= D + a max C_i, and the last only if D = 0; a worker is late by less than its own block."""
    for times, case, played in unlike():
        for (first, through), (second, _) in pairwise(played.spans):
            least, most = case.duration, case.duration + case.block * max(times)
            assert least <= second - first <= most
            assert second - first < most or not case.duration
            assert second >= through
        for (_, through), after in zip(played.spans, played.rounds[1:], strict=True):
            for i, time in enumerate(times):
                assert 0 <= after.posted[i] - through <= case.block * time
                assert after.posted[i] - through < case.block * time or not case.duration
                assert len(after.starts[i]) % case.block == 0 < len(after.starts[i])


def test_the_bounds_are_reached() -> None:
    """A communication of whole blocks ends with one; one of no time lets the slowest compute a block."""
    for duration, length in ((Fraction(6), 6), (ZERO, 3), (Fraction(6) + Fraction(1, 1000), 9)):
        (first, _), (second, _) = play(Case("acco", [Fraction(3)] * 2, duration, [ZERO] * 2, ZERO)).spans
        assert second - first == length


def test_the_slowest_binds() -> None:
    """D + a C_j <= a C_s for all others j: every round lasts a block of the slowest."""
    random = Random(24)
    for _ in range(300):
        block, whole = random.randint(1, 3), drawn(random, 0, 4)
        others = [drawn(random, 1, 3) for _ in range(random.randint(1, 3))]
        more = random.choice([ZERO, drawn(random)])
        slowest = max(others) + whole / block + more
        times = random.sample([*others, slowest], len(others) + 1)
        spans = play(case_of(random, times, whole, random.choice(("wp", "acco")), block)).spans
        assert all(second - first == block * slowest for (first, _), (second, _) in pairwise(spans))


def test_another_worker_may_be_later_than_the_slowest() -> None:
    """By hand, with micro-batches of 3 and 5: the slowest binds while D + 3 <= 5.

    For D = 4 the first three communications are from 5 to 9, 10 to 14 and 15 to 19. Then the fast worker posts at 21,
    after the slow one at 20. The fourth ends at 25, when the slow one posts; the fast one posts at 27.
    """
    for duration, begun in ((2, [5, 10, 15, 20, 25]), (4, [5, 10, 15, 21, 27])):
        spans = play(Case("dpu", [3, 5], duration, [0, 0], 0, updates=5)).spans
        assert [first for first, _ in spans] == begun


WORKED = [*[Fraction(1)] * 3, Fraction(4)]
ONE_STEP = ddp([Passes(ZERO, time) for time in WORKED], 2, ZERO, ZERO)  # of two micro-batches a worker


@pytest.mark.parametrize("duration", [ZERO, Fraction(1, 2), Fraction(3), Fraction(10, 3), Fraction(4)])
def test_three_workers_and_one_four_times_slower(duration: Fraction) -> None:
    """Rounds of 4 with 13 micro-batches, 26 in an update of 8, but for the first: DDP has 8 in 8."""
    played = play(Case("acco", WORKED, duration, [ZERO] * 4, ZERO, updates=4))
    assert all(second - first == 4 for (first, _), (second, _) in pairwise(played.spans))
    assert [each.counts for each in played.rounds[2:-1]] == [(4, 4, 4, 1)] * 6
    late = -int(-duration // 1)  # blocks of a fast worker after 4, until the first communication is through
    assert [each.counts for each in played.rounds[:2]] == [(1, 1, 1, 1), (3 + late, 3 + late, 3 + late, 1)]
    assert [sum(played.entering(update)) for update in range(4)] == [14 + 3 * late, 26, 26, 26]
    assert [ONE_STEP.length, *ONE_STEP.idle] == [*map(Fraction, (8, 6, 6, 6, 0))]
    assert Fraction(sum(played.entering(1)), 2 * len(WORKED)) == Fraction(13, 4)


@pytest.mark.parametrize("duration", [Fraction(4001, 1000), Fraction(6), Fraction(8)])
def test_a_longer_communication_halves_the_updates_and_no_gradients(duration: Fraction) -> None:
    """Rounds of 8 with 26 micro-batches, 52 in an update of 16."""
    played = play(Case("acco", WORKED, duration, [ZERO] * 4, ZERO, updates=4))
    assert all(second - first == 8 for (first, _), (second, _) in pairwise(played.spans))
    assert [each.counts for each in played.rounds[2:-1]] == [(8, 8, 8, 2)] * 6
    assert [sum(played.entering(update)) for update in (1, 2, 3)] == [52, 52, 52]


def test_a_boundary_counts_if_the_last_worker_posts_at_that_very_moment() -> None:
    """If a communication takes no time, a worker that is at a boundary when it begins posts the next one then.

    The order in which workers are looked at makes no difference.
    """
    for times in ([1, 2], [2, 1]):
        played = play(Case("dpu", times, 0, [0, 0], 0, updates=3))
        fast = times.index(1)
        assert [each.posted[fast] for each in played.rounds] == [1, 2, 4, 6]
        assert [each.posted[1 - fast] for each in played.rounds] == [2, 4, 6, 8]


def test_times_may_change_from_one_micro_batch_to_the_next() -> None:
    """By hand. Worker 0 takes 2; worker 1 takes 1, 2, ... within a round; communications last 1 + 2 + 1, a is 2.

    Worker 0 posts at 2 and worker 1 at 1; the first communication is from 2 to 6. Worker 0's blocks end at 6; those
    of worker 1 at 1 + 1 + 2 = 4 and 4 + 3 + 4 = 11. So the second is from 11 to 15. Worker 0's blocks end at 10, 14
    and 18, those of worker 1 at 14 and 21. So the third is from 21 to 25. Worker 0 ends at 22 and 26, worker 1 at 24
    and 31.
    """
    played = play(Case("dpu", lambda i, r, number: (2, number + 1)[i], 1, [1, 2], 1, block=2, updates=3))
    assert [each.posted for each in played.rounds] == [(2, 1), (6, 11), (18, 21), (26, 31)]
    assert played.spans == [(2, 6), (11, 15), (21, 25)]
    assert [each.counts for each in played.rounds] == [(1, 1), (2, 4), (6, 4), (4, 4)]
    assert (played.end, played.rounds[1].starts[1]) == (31, (1, 2, 4, 7))


def test_times_may_change_from_round_to_round() -> None:
    """Micro-batches of round r take r + 1: a seed of 1, then 2, 3 and 4 beside communications of 5."""
    played = play(Case("acco", lambda i, r, number: float(r + 1), 2.0, [1.0], 2.0, updates=2))
    assert [each.posted for each in played.rounds] == [(1.0,), (7.0,), (13.0,), (21.0,), (26.0,)]


def shares(random: Random, count: int) -> list[Bucket]:
    """Draw buckets; the last is ready at the end of the backward."""
    ready = sorted(Fraction(random.randint(0, 12), 12) for _ in range(count - 1))
    bytes_of = [random.randint(1, 9) for _ in range(count)]
    return [Bucket(r, Fraction(w, sum(bytes_of))) for r, w in zip([*ready, Fraction(1)], bytes_of, strict=True)]


def test_synchronous_steps_take_what_their_forms_say() -> None:
    random = Random(25)
    for _ in range(300):
        workers = [Passes(drawn(random), drawn(random)) for _ in range(random.randint(1, 4))]
        block, buckets = random.randint(1, 4), shares(random, random.randint(1, 5))
        exchange, update, gather = (drawn(random) for _ in range(3))
        assert ddp(workers, block, exchange, update) == played_step(workers, block, WHOLE, exchange, update)
        found = played_step(workers, block, buckets, exchange, update)
        assert ddp_in_buckets(workers, block, buckets, exchange, update) == found
        found = played_step(workers, block, buckets, exchange, update, each=True)
        assert ddp_each(workers, block, buckets, exchange, update) == found
        found = played_step(workers, block, WHOLE, exchange, update, gather)
        assert zero_1(workers, block, exchange, update, gather) == found
        found = played_step(workers, block, buckets, exchange, update, gather)
        assert zero_1_in_buckets(workers, block, buckets, exchange, update, gather) == found


def test_equal_buckets_wait_for_the_last_one_or_for_all_others() -> None:
    """e = max(C + T/K, F + B/K + T)."""
    random = Random(26)
    for _ in range(300):
        passes, count, exchange = Passes(drawn(random), drawn(random)), random.randint(1, 8), drawn(random)
        buckets = [Bucket(Fraction(k + 1, count), Fraction(1, count)) for k in range(count)]
        step = played_step([passes], 1, buckets, exchange, ZERO)
        assert step.length == through_equal_buckets(passes, count, exchange)


def test_a_bucket_waits_for_whoever_makes_it_last_and_not_for_the_slowest_worker() -> None:
    """By hand: forwards of 1 and 7, backwards of 9 and 1, two buckets, two micro-batches, an all-reduce of 8.

    Bucket 0 is ready at 10 + 1 + 4.5 = 8 + 7 + 0.5 = 15.5, bucket 1 at 20 and 16. So the last is through at
    max(15.5 + 8, 20 + 4) = 24. Were all workers put at the slowest's start, (a - 1) max C = 10, it would be at 25.5.
    """
    workers = [Passes(Fraction(1), Fraction(9)), Passes(Fraction(7), Fraction(1))]
    halves = [Bucket(Fraction(1, 2), Fraction(1, 2)), Bucket(Fraction(1), Fraction(1, 2))]
    assert ddp_in_buckets(workers, 2, halves, Fraction(8), ZERO).length == 24
    step = played_step(workers, 2, halves, Fraction(8), ZERO)
    assert step == Step(Fraction(24), (Fraction(4), Fraction(8)))


def test_local_rounds_take_their_steps_an_average_and_an_outer_step() -> None:
    random = Random(27)
    for _ in range(300):
        times, steps = [drawn(random, 1) for _ in range(random.randint(1, 4))], random.randint(1, 6)
        update, exchange, outer = (drawn(random) for _ in range(3))
        found = played_local_round(times, steps, update, exchange, outer)
        assert local_round(times, steps, update, exchange, outer) == found


def test_co2_waits_for_the_average_of_the_round_before() -> None:
    """A steady round takes max(L + O, T)."""
    random = Random(28)
    for _ in range(300):
        steps = [drawn(random, 1, 4)] * random.randint(1, 4)
        exchange, outer = drawn(random, 0, 20), drawn(random, 0, 4)
        found = played_co2(6, steps, exchange, outer)
        assert found == co2(6, sum(steps, ZERO), exchange, outer)
        assert {after - before for before, after in pairwise(found[1:])} == {max(sum(steps) + outer, exchange)}
