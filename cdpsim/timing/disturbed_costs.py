"""What disorder does to costs: slow devices and jitter make durations longer or shorter, stops make a calendar.

Releases stay as they are: a schedule states them beforehand. Links go on while a device stands still: what is ready
leaves, what is on its way arrives.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from cdpsim.cluster.disorder import Disorder, read_jitter
from cdpsim.errors import RequestError
from cdpsim.numeric.calendars import Calendar, merged, never
from cdpsim.numeric.columns import Floats, Ints, Times
from cdpsim.numeric.random_factors import DISTRIBUTIONS, uniforms
from cdpsim.program import Program
from cdpsim.timing.costs import Costs

TASKS, MESSAGES = 0, 1  # streams of random numbers
AT_ONCE = 2**15  # of which so many stay in a processor's cache while they are made into factors


def disturbed(program: Program, costs: Costs, disorder: Disorder, seed: int, run: int) -> Costs:
    """Cost a program's nodes as in one run, which the seed and its number decide."""
    if disorder == Disorder():
        return costs
    steady = steadily(program, costs, disorder)
    if not disorder.is_random:
        return steady
    duration, wires = jittered(program, steady.duration, disorder, seed, range(run, run + 1))[0], steady.wires
    if wires is not None:
        now, alone = duration[program.message_nodes], steady.duration[program.message_nodes]
        wires = wires.stretched(np.divide(now, alone, out=np.ones_like(alone), where=alone > 0))
    return replace(steady, duration=duration, wires=wires)


def steadily(program: Program, costs: Costs, disorder: Disorder) -> Costs:
    """Cost a program's nodes with all that is the same in every run: slow devices and stops."""
    exact = costs.duration.dtype.kind == "i"
    if exact:
        _refuse_parts(disorder)
    duration = costs.duration.copy()
    for one in disorder.slow:
        mine = np.flatnonzero(program.tasks.device == one.device)
        duration[mine] *= duration.dtype.type(one.factor)
    return replace(costs, duration=duration, calendar=_calendar(program, disorder, duration.dtype))


def jittered(program: Program, duration: Times, disorder: Disorder, seed: int, runs: range) -> Floats:
    """Draw the durations of several runs, a row for each: what a node takes, times its own factor of mean 1.

    Tasks are drawn in the order of their numbers, by training step, micro-batch and phase, and messages from another
    stream: so a task's factor is the same whatever the schedule, the links or the other runs are. Where steps have
    unlike numbers of micro-batches, factors are drawn as if each had the most, so that no step changes those of others.
    """
    result = np.tile(duration, (len(runs), 1))
    sent = program.message_nodes
    for text, stream, nodes in ((disorder.jitter, TASKS, slice(sent.start)), (disorder.link_jitter, MESSAGES, sent)):
        width, count, seat = result[0, nodes].size, *_seats(program, stream)
        if not (text and width):
            continue
        name, variation = read_jitter("jitter", text)
        some = max(1, AT_ONCE // width)
        for low in range(0, len(runs), some):
            drawn = np.concatenate([uniforms(seed, run, stream, count)[seat] for run in runs[low : low + some]])
            result[low : low + some, nodes] *= DISTRIBUTIONS[name][0](drawn, variation).reshape(-1, width)
    if disorder.link_jitter:
        result[:, sent.stop :] = program.parts.times(result[:, sent].T).T
    return result


def _seats(program: Program, stream: int) -> tuple[int, slice | Ints]:
    """Give how many factors are drawn of tasks or of messages, and which of them are theirs, in order."""
    if stream == MESSAGES or program.m is not None:
        return len(program.tasks if stream == TASKS else program.messages), slice(None)
    most, updates = int(program.counts.max()), len(program.tasks) - program.compute
    row = program.pass_step * most + program.pass_micro_batch
    task = row[:, None] * program.phases + np.arange(program.phases)
    count = program.steps * most * program.phases
    return count + updates, np.append(task, count + np.arange(updates))


def _refuse_parts(disorder: Disorder) -> None:
    """Refuse what would make parts of slots."""
    remedy = "give a --model, whose times are seconds"
    for option, text in (("jitter", disorder.jitter), ("link-jitter", disorder.link_jitter)):
        if text:
            raise RequestError(option, f"{text!r} makes parts of slots; {remedy}")
    for one in disorder.slow:
        if one.factor != int(one.factor):
            raise RequestError("slow", f"{one.factor:g} times makes parts of slots; take a whole factor, or {remedy}")


def _calendar(program: Program, disorder: Disorder, kind: np.dtype[Any]) -> Calendar | None:
    """When which device does nothing; a row for each that stops, and one for everything else."""
    stops = defaultdict(list)
    for one in disorder.stop:
        at = kind.type(one.at)
        stops[one.device].append((at, never(kind) if one.lasts is None else at + kind.type(one.lasts)))
    rows = {device: merged(pairs) for device, pairs in sorted(stops.items())}
    if not rows:
        return None
    at, until = (np.full((len(rows) + 1, max(map(len, rows.values()))), never(kind)) for _ in range(2))
    row = np.full(program.nodes, len(rows), dtype=np.int32)
    for k, (device, pairs) in enumerate(rows.items()):
        row[: len(program.tasks)][program.tasks.device == device] = k
        at[k, : len(pairs)], until[k, : len(pairs)] = zip(*pairs, strict=True)
    return Calendar(row, at, until)
