"""The drawing in `cdpsim.program.assembly.data_axis`, held against programs."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdpsim import SCHEDULES, Cluster, Model, Request, Stage, assemble, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.program import Category, Kind, Op, Program
from cdpsim.program.assembly import data_axis
from cdpsim.schedules.state import Placed, State
from tests.helpers.every_row import every_row

STAGE = Stage(forward=1.0, backward=2.0, parameters=8, optimizer=16)
COSTS: dict[str, Any] = {"cluster": Cluster(devices=(Devices(),), link=Link(bandwidth=10.0)), "steps": 2}
ONE = COSTS | {"m": 1, "model": Model(stages=(STAGE,))}


def by_owner(gradients: Placed) -> dict[str, Any]:
    """A request whose gradients go to owners, that send new parameters to all copies."""
    schedule = replace(SCHEDULES["multi-dp"], name="own", state=State(Placed.COPIED, gradients, Placed.OWNED))
    return {"schedule": schedule, "n": 2, "model": Model(stages=(STAGE,) * 2)} | COSTS


def in_groups(zero: int) -> dict[str, Any]:
    """A request of two groups of two ranks."""
    return {"schedule": "dp", "n": 1, "zero": zero, "shard": 2, "replicas": 2} | ONE


DRAWN: list[tuple[str, dict[str, Any]]] = [
    ("copied, copied, copied", {"schedule": "dp", "n": 1, "replicas": 2} | ONE),
    ("copied, copied/owned, owned", by_owner(Placed.COPIED)),
    ("copied, copied/owned, owned", by_owner(Placed.OWNED)),
    ("copied, copied/split, split", in_groups(1)),
    ("copied, copied/split, split", in_groups(2)),
    ("split, split, split", in_groups(3)),
    ("owned, owned, owned", {"schedule": "zero-dp", "n": 2, "model": Model(stages=(STAGE,) * 2)} | COSTS),
]


def drawing(placements: str) -> str:
    """The line of these placements."""
    return next(line.strip() for line in (data_axis.__doc__ or "").splitlines() if line.strip().startswith(placements))


def messages(text: str) -> list[str]:
    """The operations in a part of a line, in their order."""
    return re.findall(r"all-reduce|reduce-scatter|reduce|all-gather|broadcast", text)


def reached(program: Program, node: int, *, back: bool) -> set[int]:
    """All nodes before a node, or behind it."""
    pairs = np.stack(program.waits())[:: -1 if back else 1]
    found, waiting = {node}, [node]
    while waiting:
        at = waiting.pop()
        new = set(pairs[1][pairs[0] == at].tolist()) - found
        found |= new
        waiting += new
    return found


def operations(program: Program, nodes: set[int]) -> list[str]:
    """The operations of messages among these nodes, but for those between stages, one after another."""
    level = sorted(nodes & {*range(program.message_nodes.start, program.message_nodes.stop)})
    level.sort(key=lambda node: len(reached(program, node, back=True)))
    return [Op(program.messages.op[node - len(program.tasks)]).name.lower().replace("_", "-") for node in level]


@every_row(("placements", "asked"), DRAWN)
def test_messages_are_those_of_the_drawing(placements: str, asked: dict[str, Any]) -> None:
    """Of the last stage, whose forward comes before its backward: what leads to its first update, and on from there."""
    program = assemble(Request(**asked))
    tasks, stage = program.tasks, program.n - 1
    updates = np.flatnonzero((tasks.kind == Kind.U) & (tasks.stage == stage) & (tasks.step == 0))
    forwards = np.flatnonzero((tasks.kind == Kind.F) & (tasks.stage == stage))
    update, forward, read = int(updates[-1]), int(forwards[0]), int(forwards[-1])
    line = drawing(placements).removeprefix(placements)
    before, _, after = line.partition("> U")
    to_update = reached(program, update, back=True)
    if placements.startswith("copied"):
        assert [*dict.fromkeys(operations(program, to_update))] == [*dict.fromkeys(messages(before))]
        between = reached(program, update, back=False) & reached(program, read, back=True)
        assert [*dict.fromkeys(operations(program, between))] == [*dict.fromkeys(messages(after))]
    else:
        to_forward = reached(program, forward, back=True)
        assert {*operations(program, to_forward)} == {*messages(before.partition("> F")[0])}
        from_forward = reached(program, forward, back=False) & to_update
        assert {*operations(program, from_forward)} == {*messages(before.partition("> F")[2])}


@pytest.mark.parametrize(("line", "name"), [("rounds", "acco"), ("local steps", "local-sgd")])
def test_workers_that_do_not_wait_send_what_is_drawn(line: str, name: str) -> None:
    program = assemble(Request(name, 1, model=Model(stages=(STAGE,)), **COSTS, replicas=2))
    assert {*operations(program, {*range(program.nodes)})} == {*messages(drawing(line))}


def test_functions_of_the_drawing_are_there() -> None:
    named = re.findall(r"^    ([a-z_]+)  +[A-Z]\w+:|or ([a-z_]+)$", data_axis.__doc__ or "", re.MULTILINE)
    names = [name for pair in named for name in pair if name]
    assert len(names) > 4
    assert not [name for name in names if not hasattr(data_axis, name)]


@pytest.mark.parametrize("buckets", ["torch", "10 MB", "none"])
def test_whole_gradients_stay_until_the_last_of_their_messages_has_ended(buckets: str) -> None:
    """A layer's tensors go in several buckets, of which those nearest to the model's end go first."""
    run = simulate("dp", model="gpt2", cluster="a100-nodes", shard=4, zero=2, m=1, steps=1, buckets=buckets)
    program, messages, buffers = run.program, run.program.messages, run.program.buffers
    sums = np.flatnonzero(messages.op == Op.REDUCE_SCATTER)
    whole = run.request.timed_model.size("gradients")
    several = 0
    for stage, size in enumerate(whole.tolist()):
        covers = sums[(messages.stage[sums] <= stage) & (stage < messages.stage[sums] + messages.stages[sums])]
        several += len(covers) > 1
        rows = np.flatnonzero((buffers.category == Category.GRADIENTS) & (buffers.stage == stage))
        (row,) = rows[(buffers.device[rows] == 0) & (buffers.size[rows] == size)]
        end = buffers.end[row]
        assert end % 2 == 1
        assert run.end[end // 2] == run.end[len(program.tasks) + covers].max()
    assert (several > 5) == (buckets != "none")
