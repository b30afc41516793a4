"""All devices of a program in one process: the equation holds, calls are the program's, nothing lives too long."""

import re
from dataclasses import replace
from weakref import ref

import pytest

torch = pytest.importorskip("torch")

import numpy as np

from cdpsim.program import Category, Content, Kind, Program
from cdpsim.schedules.rule import CDP_V2
from tests.validation.cases import OPTIMIZERS, cyclic, every_schedule, rules_of, tolerance
from tests.validation.known import known
from validation.comparison.lifetimes import compare_lives
from validation.comparison.needs import compare_needs
from validation.replay.case import Case, Prepared, expected_parameters, largest_difference, play_in_process, prepare
from validation.replay.contents import Message, ReplayError
from validation.replay.interpreter import Device
from validation.replay.plan import Plan
from validation.replay.transport import InProcess, Mailboxes
from validation.replay.watch import Watch
from validation.training.models import MODELS

every_size = pytest.mark.parametrize("n", [1, 2, 3, 4])


# All optimizers and models with three stages; with others steps as long as gradients are, and most kinds of layers.
trained = [(3, optimizer, model) for optimizer in OPTIMIZERS for model in MODELS]
trained += [(n, "momentum", "transformer") for n in (1, 2, 4)]


@every_schedule
@pytest.mark.parametrize(("n", "optimizer", "model"), trained)
def test_it_ends_where_the_equation_does(schedule: str, n: int, optimizer: str, model: str) -> None:
    """After four steps, bit for bit where nothing is summed by a collective."""
    for rule in rules_of(schedule):
        prepared = prepare(known(Case(schedule, n, rule=rule, optimizer=OPTIMIZERS[optimizer], model=model)))
        assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) <= tolerance(schedule)


@pytest.mark.parametrize("schedule", cyclic)
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2", "newest"])
@pytest.mark.parametrize(("n", "m"), [(2, 6), (3, 6)])
def test_it_ends_where_the_equation_does_at_larger_batches(schedule: str, rule: str, n: int, m: int) -> None:
    """Several micro-batches of each worker: bit for bit, each device's own summed first."""
    prepared = prepare(known(Case(schedule, n, m=m, rule=rule)))
    assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) == 0


@every_schedule
@every_size
def test_it_calls_what_the_program_says(schedule: str, n: int) -> None:
    """Calls, partners and bytes, device by device."""
    for rule in rules_of(schedule):
        prepared = prepare(known(Case(schedule, n, rule=rule, optimizer=OPTIMIZERS["adam"])))
        outcomes = play_in_process(prepared)
        assert [outcome.calls for outcome in outcomes] == [prepared.plan.calls(d) for d in range(len(outcomes))]
        sends = sum(c for outcome in outcomes for (call, _, _), c in outcome.calls.items() if call == "send")
        assert sends == sum(message.op.name == "P2P" for message in prepared.plan.messages)


@pytest.mark.parametrize("schedule", cyclic)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_the_wrong_rule_is_noticed(schedule: str, n: int, model: str) -> None:
    """A replay of v1 is not the equation of v2, and a replay of v2 is not the equation of v1."""
    v1, v2 = (prepare(known(Case(schedule, n, rule=rule, model=model))) for rule in ("cdp-v1", "cdp-v2"))
    assert largest_difference(play_in_process(v1), expected_parameters(v2)) > 1e-6
    assert largest_difference(play_in_process(v2), expected_parameters(v1)) > 1e-6


@pytest.mark.parametrize("schedule", cyclic)
def test_any_causal_rule_is_replayed(schedule: str) -> None:
    """Some fresh readings of v2 made stale, drawn once for all."""
    draw = np.random.default_rng(4)
    for n in (2, 3, 4):
        fresh = CDP_V2.matrix(n, n) & (draw.random((n, n)) < 0.5)
        prepared = prepare(known(Case(schedule, n, rule=tuple(map(tuple, (1 - fresh).tolist())))))
        assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) == 0


def tampered(prepared: Prepared, program: Program) -> Prepared:
    """The same case with another program."""
    return replace(prepared, plan=Plan(program))


@pytest.mark.parametrize("schedule", ["multi-cdp", "pp-cdp", "zero-cdp"])
def test_what_a_program_lets_go_too_early_is_kept_and_named(schedule: str) -> None:
    """The replay does not free by the program's buffers: of one that ends with its first forward, it says so."""
    prepared = prepare(Case(schedule, 2))
    program = prepared.plan.program
    tasks, buffers = program.tasks, program.buffers
    row = int(np.flatnonzero(buffers.category == Category.PARAMETERS)[0])
    of = (buffers.device[row], buffers.stage[row], buffers.version[row], Kind.F)
    same = zip(tasks.device, tasks.stage, tasks.version, tasks.kind, strict=True)
    reader = next(node for node, columns in enumerate(same) if columns == of)
    end = buffers.end.copy()
    end[row] = 2 * reader + 1
    kept = buffers.kept != row
    early = replace(buffers, end=end, kept=buffers.kept[kept], kept_until=buffers.kept_until[kept])
    changed = tampered(prepared, replace(program, buffers=early))
    assert largest_difference(play_in_process(changed), expected_parameters(prepared)) == 0
    assert compare_lives(prepared.plan) == []
    (found,) = compare_lives(changed.plan)
    assert (found.held_until, found.size) == (program.describe(reader), buffers.size[row])
    assert re.fullmatch(
        r"device \d holds parameters of stage \d, version 0 \(\S+ B\) until F\(.*\), last needed at .*", str(found)
    )


def test_a_message_of_another_size_than_its_tensors_is_named() -> None:
    """It is sent as large as its tensors are."""
    prepared = prepare(Case("multi-cdp", 2))
    program = prepared.plan.program
    larger = tampered(prepared, replace(program, messages=replace(program.messages, size=program.messages.size + 8)))
    outcomes = play_in_process(larger)
    assert [outcome.calls for outcome in outcomes] == [prepared.plan.calls(d) for d in range(len(outcomes))]
    found = compare_needs(larger.plan, larger.training, larger.case.optimizer)
    assert len(found) == len(program.messages)
    assert {(each.kind, each.size) for each in found} == {("too large", 8)}


def of_each_kind(plan: Plan) -> list[Message]:
    """The first message of each operation and content."""
    return list({(each.op, each.content): each for each in reversed(plan.messages)}.values())


@every_schedule
@pytest.mark.parametrize("side", ["sends", "receives"])
def test_a_message_that_a_device_skips_is_named(schedule: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its devices: by the one that waits in vain, or by the one that has left it out."""
    prepared, start = prepare(Case(schedule, 2, steps=2)), Device._start
    for skipped in of_each_kind(prepared.plan):
        device = skipped.src if side == "sends" and skipped.src >= 0 else skipped.members[-1]

        def skips(self: Device, message: Message, skipped: Message = skipped, device: int = device) -> None:
            if (self._part.device, message) != (device, skipped):
                start(self, message)

        monkeypatch.setattr(Device, "_start", skips)
        with pytest.raises(ReplayError, match=rf"^device \d .*{re.escape(str(skipped))}") as raised:
            play_in_process(prepared)
        assert re.search(rf"(nothing came from device|^device) {device}\b", str(raised.value)), raised.value


def test_what_no_message_brings_is_named() -> None:
    """A device lacks data that it should have made itself; a message without readers is superfluous."""
    plan = prepare(Case("multi-cdp", 2)).plan
    key = Content.ACTIVATION, 7, 0, 0
    assert str(plan.lack(1, key)) == "device 1 does not have activation(t=7,i=0,j=0), which it has not made"
    edges = plan.program.edges
    needed = edges.before < len(plan.program.tasks)
    fewer = replace(edges, **{name: column[needed] for name, column in vars(edges).items()})
    with pytest.raises(ReplayError, match=r"^no task needs what p2p \w+\(.*\) between devices \d, \d brings$"):
        Plan(replace(plan.program, edges=fewer)).parts()


@every_schedule
@every_size
def test_the_order_keeps_every_dependency(schedule: str, n: int) -> None:
    """Every node once, after all that it waits for."""
    plan = prepare(known(Case(schedule, n))).plan
    place = np.argsort(plan.order)
    before, after = plan.program.waits()
    assert sorted(plan.order) == list(range(plan.program.nodes))
    assert (place[before] < place[after]).all()


@every_schedule
def test_what_is_due_is_behind_and_due_once(schedule: str) -> None:
    """No device waits for a message that comes later in the order, nor twice for one."""
    plan = prepare(known(Case(schedule, 4))).plan
    place = np.argsort(plan.order)
    for part in plan.parts():
        waits = [(message, node) for node, messages in part.due.items() for message in messages]
        assert all(place[message] < place[node] for message, node in waits)
        assert len({message for message, _ in waits}) == len(waits)


@every_schedule
def test_versions_die_when_their_buffers_end(schedule: str) -> None:
    """No tensor of an old version is alive at the end, and while it runs no more of them than the program holds."""
    prepared = prepare(Case(schedule, 3, optimizer=OPTIMIZERS["momentum"]))
    plan, room, made = prepared.plan, Mailboxes(), []

    def note(stage: int, version: int, theta: object) -> None:
        made.append((version, ref(theta)))

    devices = [
        Device(plan, part, prepared.training, prepared.case.optimizer, InProcess(part.device, room), note, Watch())
        for part in plan.parts()
    ]
    most = 0
    for node in plan.order:
        for number in plan.devices_of(node):
            devices[number].play(node)
        most = max(most, sum(theta() is not None for _, theta in made))
    for device in devices:
        device.finish()
    assert len(made) == int((plan.program.tasks.kind == Kind.U).sum())
    assert not [version for version, theta in made if theta() is not None]
    assert most <= 2 * len({(d, j) for d, j in zip(plan.program.tasks.device, plan.program.tasks.stage, strict=True)})
