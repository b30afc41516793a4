"""Transport of tensors: separate storages, buffers on the host, and one order in which no message can be stuck."""

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from weakref import ref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from cdpsim.errors import RequestError
from cdpsim.program import Content, Op
from cdpsim.schedules import TABLE_1
from tests.validation.cases import rules_of, tolerance
from tests.validation.harm import CARRIERS, replay_carried
from tests.validation.known import known
from validation.ranks.launcher import Ranks
from validation.ranks.member import check_device
from validation.replay import transport
from validation.replay.case import Case, expected_parameters, largest_difference, prepare
from validation.replay.contents import Message, ReplayError
from validation.replay.plan import Plan
from validation.replay.transport import Distributed, InProcess, Mailboxes, first_line
from validation.training.forms import Form

FORM = Form((3,), torch.float64)


def message(op: Op, *members: int) -> Message:
    """A message of three numbers from the first member, or with it as root."""
    return Message(7, op, Content.GRADIENT, 0, -1, 0, members[0], members, FORM.nbytes)


def test_what_is_received_has_a_storage_of_its_own() -> None:
    """The receiver does not keep the sender's storage alive."""
    room, sent = Mailboxes(), torch.arange(3.0, dtype=torch.float64)
    sending = InProcess(0, room).begin(message(Op.P2P, 0, 1), sent)
    found = InProcess(1, room).begin(message(Op.P2P, 0, 1), None, FORM).wait()
    assert sending.wait() is sent
    assert torch.equal(found, sent)
    assert found.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr()
    kept = ref(sent)
    del sent, sending
    assert kept() is None


@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=1, max_size=5), st.randoms())
def test_a_sum_in_one_process_is_everybodys_and_takes_no_more_room(values: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    """Every member's own tensor becomes the sum of all, in any order of asking."""
    room, together = Mailboxes(), message(Op.ALL_REDUCE, *range(len(values)))
    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in values]
    total = torch.stack(tensors).sum(0)
    pending = [InProcess(k, room).begin(together, tensor) for k, tensor in enumerate(tensors)]
    for k in random.sample(range(len(values)), len(values)):
        assert pending[k].wait() is tensors[k]
        assert torch.equal(tensors[k], total)


@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(0, 4))
def test_a_reduction_in_one_process_ends_at_its_root(values: list[list[int]], root: int) -> None:
    root %= len(values)
    room, together = Mailboxes(), message(Op.REDUCE, *range(len(values)))._replace(src=root)
    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in values]
    total = torch.stack(tensors).sum(0)
    pending = [InProcess(k, room).begin(together, tensor) for k, tensor in enumerate(tensors)]
    assert pending[root].wait() is tensors[root]
    assert torch.equal(tensors[root], total)


@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=1, max_size=5), st.randoms())
def test_shares_in_one_process_are_of_the_sum_and_make_the_whole(values: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    """Member k ends with the k-th three numbers of what all gave, and all with those of all."""
    count = len(values)
    room, members = Mailboxes(), range(count)
    given_ = [torch.tensor(numbers, dtype=torch.float64).repeat(count) * (1 + k) for k, numbers in enumerate(values)]
    total = torch.stack(given_).sum(0)
    scatter, gather = message(Op.REDUCE_SCATTER, *members), message(Op.ALL_GATHER, *members)._replace(node=8)
    sums = [InProcess(k, room).begin(scatter, tensor, FORM) for k, tensor in enumerate(given_)]
    order = random.sample(members, count)
    shares = {k: sums[k].wait() for k in order}
    assert torch.equal(torch.cat([shares[k] for k in members]), total)
    whole = Form((3 * count,), torch.float64)
    gathered = [InProcess(k, room).begin(gather, shares[k], whole) for k in members]
    assert all(torch.equal(gathered[k].wait(), total) for k in order)


def test_groups_are_waited_for_as_long_as_all_else_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has worked for 40 of its 60 s waits for 20 more, and tells who is not there before it is given up."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += max(seconds, 1.0)

    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    own = Distributed(HashStore(), 0, 2)
    own.allow(60)
    sleep(40)
    with pytest.raises(ReplayError, match=r"^waited 20 s at 'groups 1' for rank 1$"):
        own.make_groups([(0, 1)])
    assert 60 < now < 63


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as four:
        yield four


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("schedule", TABLE_1)
def test_it_does_not_matter_how_messages_are_carried(ranks: Ranks, schedule: str, carrier: str) -> None:
    """Through buffers on the host, or one at a time: values and counts stay, and nothing is stuck."""
    for rule in rules_of(schedule):
        case = known(Case(schedule, 2, rule=rule))
        outcomes = [outcome for outcome in ranks.call(replay_carried, case, carrier) if outcome]
        prepared = prepare(case)
        assert largest_difference(outcomes, expected_parameters(prepared)) <= tolerance(schedule)
        assert [outcome.calls for outcome in outcomes] == [prepared.plan.calls(d) for d in range(len(outcomes))]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nor_does_it_for_shares(ranks: Ranks, zero: int, carrier: str) -> None:
    """Of two groups of two ranks."""
    case = known(Case("dp", 2, m=2, zero=zero, shard=2, replicas=2))
    outcomes = [outcome for outcome in ranks.call(replay_carried, case, carrier) if outcome]
    prepared = prepare(case)
    assert largest_difference(outcomes, expected_parameters(prepared)) <= 1e-12
    assert [outcome.calls for outcome in outcomes] == [prepared.plan.calls(d) for d in range(len(outcomes))]


def stuck(plan: Plan, queues: list[deque[int]]) -> list[int]:
    """Return the devices left stuck if each waits until its message is through, as NCCL's queues do at worst."""
    at_work = True
    while at_work:
        at_work = False
        for queue in queues:
            while queue:
                members = plan.devices_of(queue[0])
                if any(not queues[member] or queues[member][0] != queue[0] for member in members):
                    break
                for member in members:
                    queues[member].popleft()
                at_work = True
    return [device for device, queue in enumerate(queues) if queue]


@pytest.mark.parametrize("schedule", TABLE_1)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_one_queue_a_device_is_enough(schedule: str, n: int) -> None:
    """For messages in both directions, collectives and tasks; so two ranks agree on what is next between them."""
    for rule in rules_of(schedule):
        plan = prepare(known(Case(schedule, n, steps=3, rule=rule))).plan
        assert not stuck(plan, [deque(part.nodes) for part in plan.parts()])


def test_another_order_on_one_side_is_stuck() -> None:
    """Two messages between the same two devices, the other way round on one of them."""
    plan = prepare(Case("multi-cdp", 2)).plan
    queues = [deque(part.nodes) for part in plan.parts()]
    one, other = [k for k, node in enumerate(queues[0]) if plan.is_message(node)][:2]
    queues[0][one], queues[0][other] = queues[0][other], queues[0][one]
    assert stuck(plan, queues) == [0, 1]


@pytest.mark.parametrize(
    ("device", "backend", "gpus", "problem"),
    [
        ("cuda", "nccl", 1, "backend: nccl needs a GPU for each rank; there are 1 for 2 ranks; use --backend gloo"),
        ("cpu", "nccl", 0, "backend: nccl needs a GPU for each rank; there are 0 for 2 ranks; use --backend gloo"),
        ("cpu", "nccl", 2, "backend: nccl carries nothing but a GPU's tensors; use --device cuda or --backend gloo"),
        ("cuda", "gloo", 0, "device: cuda needs a GPU that torch can use, and there is none; use --device cpu"),
        ("gpu", "gloo", 2, "device: unknown device 'gpu'; known are cpu, cuda"),
        ("cpu", "mpi", 2, "backend: unknown backend 'mpi'; known are gloo, nccl"),
    ],
)
def test_what_a_machine_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, gpus: int, problem: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(RequestError) as raised:
        Ranks(2, device=device, backend=backend)
    assert str(raised.value) == problem


@pytest.mark.parametrize(
    ("device", "backend", "gpus"), [("cpu", "gloo", 0), ("cuda", "gloo", 1), ("cuda", "gloo", 2), ("cuda", "nccl", 2)]
)
def test_what_a_machine_has_is_taken(monkeypatch: pytest.MonkeyPatch, device: str, backend: str, gpus: int) -> None:
    """Ranks may share a GPU with gloo, and need not with NCCL."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    check_device(device, backend, 2)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[/build/gloo/transport/tcp/pair.cc:538] Connection closed\nmore", "Connection closed"),
        ("[a.cc:1] Closed [::1]:80. This is typically caused by another.", "Closed [::1]:80"),
        ("[enforce fail at alloc_cpu.cpp:121] err == 0. Full", "err == 0. Full"),
        ("", "RuntimeError"),
    ],
)
def test_what_torch_says_becomes_one_line(said: str, told: str) -> None:
    assert first_line(RuntimeError(said)) == told
