"""Columns of messages that are one number throughout, and groups whose ranks are not their members."""

from dataclasses import replace

import numpy as np
import pytest

from cdpsim import Cluster, Request, RequestError, assemble
from cdpsim.cluster import Devices, Link
from cdpsim.numeric.columns import concatenate_columns, take_rows
from cdpsim.program import Op, Program
from cdpsim.program.check import check_program
from cdpsim.timing.costs import node_costs
from tests.helpers.strategies import in_seconds

LINKS = Cluster(devices=(Devices(speed=1.0),), link=Link(latency=2.0, bandwidth=1.0))


def program(expand: bool = False) -> Program:
    """Two replicas of two stages."""
    request = Request("1f1b", 2, m=2, replicas=2, model=in_seconds(2), cluster=LINKS, expand_collectives=expand)
    return assemble(request)


@pytest.mark.parametrize("expand", [False, True])
def test_default_columns_take_no_memory(expand: bool) -> None:
    """Views of one number, as long as the others, where no message goes in a stream."""
    messages = assemble(
        Request("multi-dp", 2, m=2, model=in_seconds(2), cluster=LINKS, expand_collectives=expand)
    ).messages
    for column, value in ((messages.stages, 1), (messages.stream, -1)):
        assert column.strides == (0,)
        assert column.tolist() == [value] * len(messages)


def test_joining_keeps_one_number_and_loses_it_where_parts_differ() -> None:
    """The parts may be of any length; nothing of an empty one is asked."""
    one, other = (np.broadcast_to(np.int8(value), 3) for value in (4, 5))
    kind = np.dtype(np.int32)
    same = concatenate_columns([one, other[:0], one], kind)
    assert (same.strides, same.dtype, same.tolist()) == ((0,), kind, [4] * 6)
    mixed = concatenate_columns([one, other], kind)
    assert (mixed.strides, mixed.tolist()) == ((4,), [4, 4, 4, 5, 5, 5])
    assert concatenate_columns([], kind).tolist() == concatenate_columns([one[:0]], kind).tolist() == []
    assert take_rows(one, np.array([2, 0])).strides == (0,)
    assert take_rows(np.arange(3), np.array([2, 0])).tolist() == [2, 0]
    assert take_rows(one[:0], np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("stages", [0, 3])
def test_stages_that_are_not_there_are_refused(stages: int) -> None:
    """The first message of such stages is named."""
    sound = program()
    messages = sound.messages
    changed = messages.stages.copy()
    changed[3] = stages
    with pytest.raises(RequestError, match="carries something of stages that are not there") as refused:
        check_program(replace(sound, messages=replace(messages, stages=changed)))
    assert sound.describe(len(sound.tasks) + 3) in str(refused.value)


def test_a_collective_costs_what_its_ranks_take() -> None:
    """A ring of k ranks: 2 (k - 1) rounds of latency 2 and a k-th of 1 byte at 1 byte a second."""
    own = program()
    sums = np.flatnonzero(own.messages.op == Op.ALL_REDUCE) + len(own.tasks)
    assert own.ranks_of(0).tolist() == own.groups[0].tolist()
    wide = replace(own, ranks=tuple(np.concatenate([members, members + 1])[None] for members in own.groups))
    for each, k in ((own, 2), (wide, 4)):
        costs = node_costs(each, in_seconds(2), LINKS, "ring")
        assert costs.duration[sums] == pytest.approx(2 * (k - 1) * (2 + 1 / k))
