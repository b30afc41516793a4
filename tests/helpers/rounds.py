"""Overlapped updates played event by event, and closed forms of overlapped, synchronous and local updates.

It is a second opinion, written from the rules alone. Times may be integers, floats or fractions.
A *round* is what workers hand over in one communication. Round 0 is the seed, or the first step of a warm-up.
So interval r of a run without warm-up is round r + 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

Number = TypeVar("Number", int, float, Fraction)

METHODS = ("dpu", "wp", "acco")


class Version(NamedTuple):
    """Parameters by how often they were updated."""

    number: int
    estimate: bool = False


class Update(NamedTuple):
    """One optimizer step: what it makes, where it starts from, and the rounds whose gradients it takes."""

    makes: Version
    base: Version
    rounds: tuple[int, ...]


def updates_of(method: str, r: int) -> tuple[Update, ...]:
    """List the updates that communication r makes, in order; workers take over the last.

    Communication -1 brings what is there at first: theta(0), and as WP's est(1) theta(0), too.
    """
    if method == "acco":
        t, half = divmod(r, 2)
        base = Version(t)
        return (Update(Version(t + 1), base, (r - 1, r)) if half else Update(Version(t + 1, True), base, (r,)),)
    real = Update(Version(r + 1), Version(r), (r,))
    if method == "wp":
        return real, Update(Version(r + 2, True), real.makes, (r,))
    return (real,)


@dataclass(frozen=True)
class Case(Generic[Number]):
    """A run of one method.

    The time of a micro-batch is one of each worker, or a function of worker, round and number within the round.
    """

    method: str
    times: Sequence[Number] | Callable[[int, int, int], Number]
    reduce_scatter: Number
    update: Sequence[Number]  # of each worker's shard
    gather: Number
    block: int = 1
    updates: int = 1  # of theta, those of the warm-up among them
    warm_up: int = 0

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return len(self.update)

    @property
    def communications(self) -> int:
        """Return how many communications the updates take."""
        return self.updates * (2 if self.method == "acco" else 1)

    @property
    def duration(self) -> Number:
        """Return how long a communication lasts: the gather begins when the slowest shard has been updated."""
        return self.reduce_scatter + len(updates_of(self.method, 0)) * max(self.update) + self.gather

    def time(self, worker: int, r: int, number: int) -> Number:
        """Return how long one micro-batch takes."""
        return self.times(worker, r, number) if callable(self.times) else self.times[worker]

    def block_of(self, r: int) -> int:
        """Return how many micro-batches are in a block of a round: the seed has one if there is no warm-up."""
        return self.block if r or self.warm_up else 1


@dataclass(frozen=True)
class Round(Generic[Number]):
    """What workers computed between two postings, and the communication that took it; the last round has none."""

    reads: Version
    enters: int  # the update of theta that takes its gradients; the number of updates if they are thrown away
    starts: tuple[tuple[Number, ...], ...]  # of each worker's micro-batches
    posted: tuple[Number, ...]
    begun: Number | None
    ended: Number | None
    updates: tuple[Update, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of micro-batches of each worker."""
        return tuple(map(len, self.starts))

    @property
    def lag(self) -> int:
        """Return how many updates were made between what it reads and what its own update starts from."""
        return self.enters - self.reads.number

    @property
    def span(self) -> tuple[Number, Number]:
        """Return when its communication began and ended."""
        assert self.begun is not None and self.ended is not None, "it was thrown away"
        return self.begun, self.ended


@dataclass(frozen=True)
class Played(Generic[Number]):
    """A run: its rounds, the last of them thrown away."""

    case: Case[Number]
    rounds: tuple[Round[Number], ...]

    @property
    def end(self) -> Number:
        """Return the last worker's last boundary."""
        return max(self.rounds[-1].posted)

    @property
    def spans(self) -> list[tuple[Number, Number]]:
        """List when communications began and ended."""
        return [each.span for each in self.rounds[:-1]]

    def entering(self, update: int) -> tuple[int, ...]:
        """Return how many micro-batches of each worker enter an update of theta: its weights."""
        of = [each.counts for each in self.rounds if each.enters == update]
        return tuple(map(sum, zip(*of, strict=True)))


def play(case: Case[Number]) -> Played[Number]:
    """Play a run, event by event."""
    assert case.warm_up < case.updates
    return _Player(case).play()


_STREAM, _COMPUTE = range(2)  # whose event it is: at equal times those of the communication come first
_EVERYONE = -1


@dataclass
class _Worker(Generic[Number]):
    """A worker: its round, what it reads in it, and the starts of its micro-batches by round."""

    reads: list[Version] = field(default_factory=lambda: [Version(0)])
    starts: list[list[Number]] = field(default_factory=lambda: [[]])
    posted: list[Number] = field(default_factory=list)

    @property
    def round(self) -> int:
        return len(self.posted)


class _Player(Generic[Number]):
    """The events to come, the workers, and the communications begun and ended.

    Events of the stream are the ends of a reduce-scatter, of each worker's updates, and of a gather.
    """

    def __init__(self, case: Case[Number]) -> None:
        self.case: Case[Number] = case
        self.events: list[tuple[Number, int, str, int]] = []
        self.workers: list[_Worker[Number]] = [_Worker() for _ in range(case.workers)]
        self.begun: list[Number] = []
        self.ended: list[Number] = []
        self.updated = 0  # workers whose updates have ended in the communication under way

    def play(self) -> Played[Number]:
        for worker in range(self.case.workers):
            self.compute(worker, 0 * self.case.gather)
        while self.events:
            self.moment(self.events[0][0])
        return Played(self.case, tuple(self.round(r) for r in range(self.case.communications + 1)))

    def moment(self, now: Number) -> None:
        """Let all happen that happens now.

        A worker at its boundary goes on without posting only when nothing else can end now.
        """
        waiting: list[int] = []
        while self.events and self.events[0][0] == now:
            _, whose, what, worker = heappop(self.events)
            if whose == _COMPUTE:
                waiting.append(worker)
            else:
                self.communicate(what, now)
            if self.events and self.events[0][0] == now:
                continue
            posting = [worker for worker in waiting if self.may_post(worker)]
            waiting = [worker for worker in waiting if worker not in posting]
            for worker in posting:
                self.post(worker, now)
        for worker in waiting:
            self.compute(worker, now)

    def compute(self, worker: int, now: Number) -> None:
        """Begin a block."""
        mine, case = self.workers[worker], self.case
        starts = mine.starts[mine.round]
        for _ in range(case.block_of(mine.round)):
            taken = case.time(worker, mine.round, len(starts))
            assert taken > 0, "a micro-batch takes time"
            starts.append(now)
            now = now + taken
        heappush(self.events, (now, _COMPUTE, "boundary", worker))

    def may_post(self, worker: int) -> bool:
        """Return whether what the last communication brings is here; the seed and warm-up steps wait for nothing."""
        r = self.workers[worker].round
        return r <= self.case.warm_up or len(self.ended) >= r

    def post(self, worker: int, now: Number) -> None:
        """Take over what the communication before brought, hand over the gradients, and go on."""
        mine, case = self.workers[worker], self.case
        r = mine.round
        mine.posted.append(now)
        if r < case.communications and all(other.round > r for other in self.workers):
            self.begun.append(now)
            heappush(self.events, (now + case.reduce_scatter, _STREAM, "reduce-scatter", _EVERYONE))
        if case.warm_up <= r < case.communications:
            self.begin_round(worker, updates_of(case.method, r - 1)[-1].makes, now)

    def begin_round(self, worker: int, reads: Version, now: Number) -> None:
        mine = self.workers[worker]
        mine.reads.append(reads)
        mine.starts.append([])
        self.compute(worker, now)

    def communicate(self, what: str, now: Number) -> None:
        """Go on with the communication under way; after a warm-up step all workers go on, too."""
        case, r = self.case, len(self.ended)
        made = updates_of(case.method, r)
        if what == "reduce-scatter":
            for worker, each in enumerate(case.update):
                heappush(self.events, (now + len(made) * each, _STREAM, "update", worker))
        elif what == "update":
            self.updated += 1
            if self.updated == case.workers:
                self.updated = 0
                heappush(self.events, (now + case.gather, _STREAM, "gather", _EVERYONE))
        else:
            self.ended.append(now)
            if r < case.warm_up:
                for worker in range(case.workers):
                    self.begin_round(worker, made[-1].makes, now)

    def round(self, r: int) -> Round[Number]:
        """Return what happened in a round."""
        case, thrown = self.case, r == self.case.communications
        reads = {worker.reads[r] for worker in self.workers}
        assert len(reads) == 1
        made = [update for each in range(case.communications) for update in updates_of(case.method, each)]
        takes = [update.makes.number - 1 for update in made if r in update.rounds and not update.makes.estimate]
        (enters,) = takes or [case.updates]
        return Round(
            reads=reads.pop(),
            enters=enters,
            starts=tuple(tuple(worker.starts[r]) for worker in self.workers),
            posted=tuple(worker.posted[r] for worker in self.workers),
            begun=None if thrown else self.begun[r],
            ended=None if thrown else self.ended[r],
            updates=() if thrown else updates_of(case.method, r),
        )


def ceiling(over: Number, under: Number) -> int:
    """Return the least integer that is not below a quotient."""
    return int(-(-over // under))


def recurrence(times: Sequence[Number], block: int, duration: Number, communications: int) -> list[tuple[Number, ...]]:
    """Return when workers post, of each round from the seed to the one thrown away: three lines instead of events."""
    posts = [tuple(times)]
    for _ in range(communications):
        through = max(posts[-1]) + duration
        blocks = [(at, block * time) for at, time in zip(posts[-1], times, strict=True)]
        posts.append(tuple(at + max(1, ceiling(through - at, each)) * each for at, each in blocks))
    return posts


@dataclass(frozen=True)
class Alike(Generic[Number]):
    """Closed forms of a case whose workers are alike."""

    blocks: int  # of an interval
    interval: Number
    stream_idle: Number  # of a round
    period: Number  # of an update of theta
    per_update: int  # micro-batches
    first_update: int
    end: Number
    thrown_away: int

    @classmethod
    def of(cls, case: Case[Number]) -> "Alike[Number]":
        """Evaluate them."""
        first, block, n = case.time(0, 0, 0), case.block * case.time(0, 0, 0), case.workers
        k = max(1, ceiling(case.duration, block))
        halves = 2 if case.method == "acco" else 1
        per_interval = k * case.block * n
        return cls(
            blocks=k,
            interval=k * block,
            stream_idle=k * block - case.duration,
            period=halves * k * block,
            per_update=halves * per_interval,
            first_update=case.block_of(0) * n + (halves - 1) * per_interval,
            end=case.warm_up * (block + case.duration)
            + (block if case.warm_up else first)
            + halves * (case.updates - case.warm_up) * k * block,
            thrown_away=per_interval,
        )


class Passes(NamedTuple):
    """A worker's forward and backward of one micro-batch."""

    forward: Fraction
    backward: Fraction

    @property
    def both(self) -> Fraction:
        """Return the time of a micro-batch."""
        return self.forward + self.backward


class Bucket(NamedTuple):
    """The share of a backward after which a bucket is ready, and its share of the bytes."""

    ready: Fraction
    weight: Fraction


WHOLE = (Bucket(Fraction(1), Fraction(1)),)


class Step(NamedTuple):
    """One step or round: its length, and how long each worker's compute stream idles in it."""

    length: Fraction
    idle: tuple[Fraction, ...]


def last_exchange(
    workers: Sequence[Passes], starts: Sequence[Fraction], buckets: Sequence[Bucket], exchange: Fraction
) -> Fraction:
    """Return when the last bucket is through, of micro-batches that start at these times."""
    return max(
        max(start + each.forward + bucket.ready * each.backward for start, each in zip(starts, workers, strict=True))
        + exchange * sum(later.weight for later in buckets[k:])
        for k, bucket in enumerate(buckets)
    )


def ddp(workers: Sequence[Passes], block: int, exchange: Fraction, update: Fraction) -> Step:
    """Return a step with one all-reduce after the last backward."""
    slowest = max(each.both for each in workers)
    idle = tuple(exchange + block * (slowest - each.both) for each in workers)
    return Step(block * slowest + exchange + update, idle)


def ddp_in_buckets(
    workers: Sequence[Passes], block: int, buckets: Sequence[Bucket], exchange: Fraction, update: Fraction
) -> Step:
    """Return a step whose buckets are reduced beside the last backward."""
    starts = [(block - 1) * each.both for each in workers]
    through = last_exchange(workers, starts, buckets, exchange)
    return Step(through + update, tuple(through - block * each.both for each in workers))


def through_equal_buckets(passes: Passes, count: int, exchange: Fraction) -> Fraction:
    """Return when the last of that many equal buckets is through."""
    first, last = passes.forward + passes.backward / count + exchange, passes.both + exchange / count
    return max(first, last)


def ddp_each(
    workers: Sequence[Passes], block: int, buckets: Sequence[Bucket], exchange: Fraction, update: Fraction
) -> Step:
    """Return a step that exchanges every micro-batch's gradients, and waits for them before the next."""
    each = last_exchange(workers, [Fraction(0)] * len(workers), buckets, exchange)
    return Step(block * each + update, tuple(block * (each - passes.both) for passes in workers))


def zero_1(workers: Sequence[Passes], block: int, scatter: Fraction, update: Fraction, gather: Fraction) -> Step:
    """Return a step with a reduce-scatter, the update of a shard, and an all-gather."""
    return ddp(workers, block, scatter + gather, update)


def zero_1_in_buckets(
    workers: Sequence[Passes],
    block: int,
    buckets: Sequence[Bucket],
    scatter: Fraction,
    update: Fraction,
    gather: Fraction,
) -> Step:
    """Return a step whose reduce-scatter goes in buckets beside the last backward."""
    step = ddp_in_buckets(workers, block, buckets, scatter, update)
    return Step(step.length + gather, tuple(idle + gather for idle in step.idle))


def local_round(
    times: Sequence[Fraction], steps: int, update: Fraction, exchange: Fraction, outer: Fraction = Fraction(0)
) -> Step:
    """Return a round of Local SGD, or with an outer step of SlowMo and DiLoCo."""
    slowest = max(times)
    idle = tuple(exchange + steps * (slowest - each) for each in times)
    return Step(steps * (slowest + update) + exchange + outer, idle)


def co2(rounds: int, length: Fraction, exchange: Fraction, outer: Fraction) -> list[Fraction]:
    """Return when the averages of CO2's rounds start; a round's own steps take its length."""
    ready = [length]
    for r in range(1, rounds):
        ready.append(max(ready[-1] + (outer if r > 1 else 0) + length, ready[-1] + exchange))
    return ready


def played_step(
    workers: Sequence[Passes],
    block: int,
    buckets: Sequence[Bucket],
    exchange: Fraction,
    update: Fraction,
    gather: Fraction = Fraction(0),
    each: bool = False,
) -> Step:
    """Play a synchronous step: micro-batch by micro-batch, bucket by bucket."""
    free, stream = [Fraction(0)] * len(workers), Fraction(0)
    for micro_batch in range(block):
        forwards = [at + passes.forward for at, passes in zip(free, workers, strict=True)]
        free = [at + passes.backward for at, passes in zip(forwards, workers, strict=True)]
        if each or micro_batch == block - 1:
            for bucket in buckets:
                for forward, end in zip(forwards, free, strict=True):
                    stream = max(stream, forward + (end - forward) * bucket.ready)
                stream += exchange * bucket.weight
            free = [stream] * len(workers)
    length = stream + update + gather
    return Step(length, tuple(length - block * passes.both - update for passes in workers))


def played_local_round(
    times: Sequence[Fraction], steps: int, update: Fraction, exchange: Fraction, outer: Fraction
) -> Step:
    """Play a round of local steps, each worker alone, then what they do together."""
    ends = []
    for each in times:
        end = Fraction(0)
        for _ in range(steps):
            end = end + each + update
        ends.append(end)
    averaged = max(ends) + exchange
    return Step(averaged + outer, tuple(averaged - end for end in ends))


def played_co2(rounds: int, steps: Sequence[Fraction], exchange: Fraction, outer: Fraction) -> list[Fraction]:
    """Play CO2 on workers that are alike, and return when averages start.

    At the end of a round a worker waits for the average of the round before, then starts its own, then makes the
    outer step from the average that came.
    """
    compute = Fraction(0)
    begun: list[Fraction] = []
    for r in range(rounds):
        for step in steps:
            compute += step
        if r:
            compute = max(compute, begun[r - 1] + exchange)
        begun.append(compute)
        if r:
            compute += outer
    return begun


class Means(NamedTuple):
    """A run of local steps: when its means, or sums of a warm-up, begin and end, and when its last update ends."""

    begun: list[Fraction]
    ended: list[Fraction]
    end: Fraction


def played_means(
    steps: Sequence[Fraction],
    rounds: tuple[int, int],
    exchange: Fraction,
    outer: Sequence[Fraction],
    late: bool = False,
    warm_up: tuple[int, Sequence[Fraction]] = (0, ()),
) -> Means:
    """Play workers with the time of a local step of each, and a number of local steps for each round.

    A worker gives its parameters to a mean at the end of a round. It waits for that mean, or if means are `late` for
    the one before, and makes its outer update; then it goes on. A warm-up has a number of steps, and what each
    worker's update takes in them: each ends with a sum, before the update.
    """
    free, begun, ended = [Fraction(0)] * len(steps), list[Fraction](), [Fraction(0)]

    def meet(at: Sequence[Fraction]) -> None:
        begun.append(max(*at, ended[-1]))
        ended.append(begun[-1] + exchange)

    many, updates = warm_up
    for _ in range(many):
        meet([at + step - update for at, step, update in zip(free, steps, updates, strict=True)])
        free = [ended[-1] + update for update in updates]
    count, each_round = rounds
    for r in range(count + late):
        free = [at + each_round * step for at, step in zip(free, steps, strict=True)]
        before = ended[-1]
        if r < count:
            meet(free)
        if late and r == 0:
            continue
        through = before if late else ended[-1]
        free = [max(at, through) + more for at, more in zip(free, outer, strict=True)]
    return Means(begun, ended[1:], max(free))
