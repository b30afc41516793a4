"""Every rule of a program, each with a fault that breaks it and the name that the refusal must say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, Model, RequestError, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.numeric.paths import find_cycle
from cdpsim.program import EdgeKind, Edges, Kind, Program
from cdpsim.program.check import check_program
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import ENGINES
from tests.helpers.every_row import every_row


def program(schedule: str = "multi-cdp", n: int = 3) -> Program:
    """A sound program to break."""
    run = simulate(schedule, n)
    return run.program


def node(of: Program, name: str) -> int:
    """The node that describes itself so."""
    return next(k for k in range(of.nodes) if of.describe(k) == name)


def with_task(of: Program, name: str, **changes: int) -> Program:
    """Change columns of one task."""
    columns = {}
    for column, value in changes.items():
        columns[column] = getattr(of.tasks, column).copy()
        columns[column][node(of, name)] = value
    return replace(of, tasks=replace(of.tasks, **columns))


def with_edge(of: Program, before: int, after: int, kind: EdgeKind = EdgeKind.DATA) -> Program:
    """Add a dependency."""
    edges = of.edges
    ends = (np.append(edges.before, before), np.append(edges.after, after), np.append(edges.kind, kind))
    return replace(of, edges=Edges(*ends))


def redirected(old: str, new: str) -> Program:
    """Let what waits for one node wait for another one, in a program whose messages take their devices' time."""
    stage, link = Stage(forward=1.0, backward=2.0, boundary=1), Link(latency=0.5)
    cluster = Cluster(devices=(Devices(overlap="none"),), link=link)
    of = simulate("1f1b", 2, model=Model(stages=(stage, stage)), cluster=cluster).program
    before = np.where(of.edges.before == node(of, old), node(of, new), of.edges.before)
    return replace(of, edges=replace(of.edges, before=before))


def without_edges(of: Program, keep: Any) -> Program:
    """Keep only some dependencies."""
    edges = of.edges
    return replace(of, edges=Edges(edges.before[keep], edges.after[keep], edges.kind[keep]))


def swapped_lane(of: Program) -> Program:
    """Let a device's second task stand in another device's lane, and the other's second task here."""
    tasks = of.lane_tasks.copy()
    a, b = of.lane_start[0] + 1, of.lane_start[1] + 1
    tasks[[a, b]] = tasks[[b, a]]
    return replace(of, lane_tasks=tasks)


def unused_buffer(of: Program) -> Program:
    """Take its end from the first buffer."""
    end = of.buffers.end.copy()
    end[0] = -1
    return replace(of, buffers=replace(of.buffers, end=end))


def message_named(of: Program, content: str) -> int:
    """The first message of that content that some task makes."""
    return next(k for k in range(len(of.tasks), of.nodes) if content in of.describe(k))


def unread(of: Program) -> Program:
    """Take away all that waits for the first message of parameters."""
    return without_edges(of, of.edges.before != message_named(of, "parameters"))


def unsent(of: Program) -> Program:
    """Let the first gradient message wait for nothing."""
    return without_edges(of, of.edges.after != message_named(of, "gradient"))


def no_update(of: Program) -> Program:
    """Let the updates of the last step and stage 0 be of stage 1."""
    tasks = of.tasks
    stage = np.where((tasks.kind == Kind.U) & (tasks.step == 2) & (tasks.stage == 0), 1, tasks.stage)
    device = np.where((tasks.kind == Kind.U) & (tasks.step == 2) & (tasks.stage == 0), 0, tasks.device)
    return replace(of, tasks=replace(tasks, stage=stage, device=device))


FAULTS: list[tuple[Callable[[], Program], str]] = [
    (
        lambda: with_task(program(), "F(t=1,i=1,j=1)", stage=2),
        r"F\(t=1,i=1,j=2\) stands where a task of stage 1 belongs",
    ),
    (lambda: with_task(program(), "B(t=1,i=1,j=1)", device=0), r"B\(t=1,i=1,j=1\) is on device 0 but in another"),
    (
        lambda: with_task(program(), "B(t=1,i=1,j=1)", kind=Kind.F),
        r"F\(t=1,i=1,j=1\) stands where a task of kind 2 belongs",
    ),
    (
        lambda: with_task(program(), "B(t=1,i=1,j=1)", version=0),
        r"F\(t=1,i=1,j=1\) and B\(.*differ in version: 1 and 0",
    ),
    (lambda: with_task(program(), "F(t=1,i=1,j=1)", version=2), r"differ in version|reads version 2"),
    (lambda: with_edge(program(), 0, 10**6), r"dependency \d+ names node 1000000 as its 'after'"),
    (lambda: with_edge(program(), -3, 0), r"dependency \d+ names node -3 as its 'before'"),
    (
        lambda: redirected("p2p activation(t=0,i=0,j=0) 0->1", "device 1's part in p2p activation(t=0,i=0,j=0) 0->1"),
        r"dependency \d+ is of data and names device 1's part in p2p .* as its 'before', which is no task",
    ),
    (lambda: swapped_lane(program()), r"F\(t=0,i=1,j=1\) is on device 1 but in another device's lane"),
    (lambda: replace(program(), lane_tasks=np.roll(program().lane_tasks[[0, *range(53)]], 1)), "places in lanes"),
    (lambda: no_update(program()), r"the gradient of B\(t=2,i=0,j=0\) never reaches an update"),
    (lambda: unread(program()), r"p2p parameters\(t=0,j=\d\) \d->\d has no reader"),
    (lambda: unsent(program()), r"p2p gradient\(t=0,j=\d\) \d->\d has nothing to send"),
    (lambda: unused_buffer(program()), r"on device 0 are never freed"),
]


@every_row(("fault", "message"), FAULTS)
def test_a_broken_rule_is_refused_by_the_name_of_its_task(fault: Callable[[], Program], message: str) -> None:
    """Each fault is caught, and the error says where it is."""
    with pytest.raises(RequestError, match=message):
        check_program(fault())


def test_a_version_that_nobody_makes_is_refused() -> None:
    """Both passes may agree on a version that does not exist."""
    broken = with_task(program(), "F(t=1,i=2,j=1)", version=3)
    broken = with_task(broken, "B(t=1,i=2,j=1)", version=3)
    with pytest.raises(RequestError, match=r"F\(t=1,i=2,j=1\) reads version 3, which does not exist for it"):
        check_program(broken)


def test_a_version_that_no_update_makes_is_refused() -> None:
    """theta_1 of stage 1 is read by micro-batch 1 first: under CDP-v2 micro-batch 0 reads that of stage 2 alone."""
    broken = with_task(program(), "U(t=0,j=1) on device 2", version=9)
    with pytest.raises(RequestError, match=r"F\(t=1,i=1,j=1\) reads version 1, which does not exist for it"):
        check_program(broken)


def test_every_micro_batch_has_one_forward_and_one_backward_of_each_stage() -> None:
    """A pattern that all micro-batches share may still be wrong."""
    sound = program(n=1)
    kind = np.where(sound.tasks.kind == Kind.B, Kind.W, sound.tasks.kind)
    with pytest.raises(RequestError, match="a micro-batch has 0 tasks B of stage 0; it needs one"):
        check_program(replace(sound, tasks=replace(sound.tasks, kind=kind)))


def test_lanes_hold_as_many_tasks_as_there_are_passes() -> None:
    """A program that says that it has more steps than its lanes do is refused before anything is counted."""
    with pytest.raises(RequestError, match="54 compute tasks do not go into 7 steps of 3 micro-batches"):
        check_program(replace(program(), counts=np.full(7, 3, dtype=np.int32)))


def test_a_doubled_update_is_refused() -> None:
    """A device updates a stage once in a step."""
    with pytest.raises(RequestError, match=r"U\(t=0,j=0\) on device 2 stands there twice"):
        check_program(with_task(program(), "U(t=0,j=1) on device 2", stage=0))


def test_a_compute_task_among_the_updates_is_refused() -> None:
    """It has no place in a lane."""
    with pytest.raises(RequestError, match=r"W\(t=0,j=1\) on device 2 stands among the updates"):
        check_program(with_task(program(), "U(t=0,j=1) on device 2", kind=Kind.W))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_deadlock_is_shown_as_its_cycle(engine: str) -> None:
    """The error contains the cycle, in order, and both engines notice it."""
    sound = program("single-cdp", 2)
    first, last = node(sound, "F(t=0,i=1,j=0)"), node(sound, "B(t=0,i=1,j=0)")
    stuck = with_edge(sound, last, first)
    cycle = r"F\(t=0,i=1,j=0\) -> F\(t=0,i=1,j=1\) -> B\(t=0,i=1,j=1\) -> B\(t=0,i=1,j=0\) -> F\(t=0,i=1,j=0\)$"
    with pytest.raises(RequestError, match="schedule deadlocks: " + cycle):
        check_program(stuck)
    costs = Costs(np.ones(stuck.nodes), np.ones(len(stuck.messages), dtype=np.int64), np.zeros(len(stuck.releases)))
    with pytest.raises(RequestError, match=cycle):
        ENGINES[engine](stuck, costs)


def test_a_long_cycle_is_cut() -> None:
    """A cycle of hundreds of tasks still fits into a line."""
    sound = program("multi-dp", 8)
    stuck = with_edge(sound, node(sound, "B(t=2,i=3,j=0)"), node(sound, "F(t=0,i=3,j=0)"))
    assert len(find_cycle(*stuck.waits(), stuck.nodes)) > 8
    with pytest.raises(RequestError, match=r"\.\.\. \d+ more -> F\(t=0,i="):
        check_program(stuck)


def test_a_sound_program_has_no_cycle() -> None:
    """Nothing to say."""
    sound = program()
    assert find_cycle(*sound.waits(), sound.nodes) == []


@pytest.mark.parametrize(
    ("version", "base", "first_step", "problem"),
    [
        (2, 0, 0, r"U\(t=1,j=0\) on device 2 stands there twice; a device makes a version of a stage once"),
        (1, 1, 0, r"U\(t=0,j=0\) on device 2 starts from version 1, which does not exist for it"),
        (1, 7, 0, "starts from version 7, which does not exist for it"),
        (1, 0, 1, "takes gradients from step 1 on, after its own step"),
        (1, 0, -1, "takes gradients from step -1 on"),
    ],
)
def test_what_an_update_starts_from_exists(version: int, base: int, first_step: int, problem: str) -> None:
    """The first update of stage 0 is broken in each way that a table of bases can be."""
    sound = program()
    row = node(sound, "U(t=0,j=0) on device 2") - sound.compute
    bases, first_steps = sound.base.copy(), sound.first_step.copy()
    bases[row], first_steps[row] = base, first_step
    broken = with_task(sound, "U(t=0,j=0) on device 2", version=version)
    with pytest.raises(RequestError, match=problem):
        check_program(replace(broken, base=bases, first_step=first_steps))
