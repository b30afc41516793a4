"""Costs under disorder: slow devices and jitter make durations longer or shorter, stops make a calendar.

Releases stay as they are: a schedule states them beforehand. Links go on while a device stands still: a message that is
ready leaves, and one under way arrives.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from cdpsim.cluster.disorder import Disorder, read_jitter
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints, Times
from cdpsim.numeric.disturbances import DISTRIBUTIONS, Calendar, merge_stops, never, uniforms
from cdpsim.program import Program
from cdpsim.timing.costs import Costs

_TASK_STREAM, _MESSAGE_STREAM, _UPDATE_STREAM = 0, 1, 2  # of random numbers
_DRAWN_AT_ONCE = 2**15  # numbers that stay in a processor's cache while they are made into factors


def disturbed_costs(program: Program, costs: Costs, disorder: Disorder, seed: int, run: int) -> Costs:
    """Return the costs of a program in one run, which the seed and its number decide."""
    if disorder == Disorder():
        return costs
    steady = steady_costs(program, costs, disorder)
    if not disorder.is_random:
        return steady
    duration, wires = jittered_durations(program, steady.duration, disorder, seed, range(run, run + 1))[0], steady.wires
    if wires is not None:
        now, alone = duration[program.message_nodes], steady.duration[program.message_nodes]
        factor = np.divide(now, alone, out=np.ones_like(alone), where=alone > 0)  # of wait and size
        wires = replace(wires, latency=wires.latency * factor, size=wires.size * factor)
    return replace(steady, duration=duration, wires=wires)


def steady_costs(program: Program, costs: Costs, disorder: Disorder) -> Costs:
    """Return the costs of a program with the disorder that is the same in every run: slow devices and stops."""
    duration = costs.duration.copy()
    if duration.dtype.kind == "i":
        _refuse_parts_of_slots(disorder)
    for slow in disorder.slow:
        tasks = np.flatnonzero(program.tasks.device == slow.device)
        duration[tasks] *= duration.dtype.type(slow.factor)
    return replace(costs, duration=duration, calendar=_calendar(program, disorder, duration.dtype))


def jittered_durations(program: Program, duration: Times, disorder: Disorder, seed: int, runs: range) -> Floats:
    """Return the durations of several runs, a row for each: a node's duration times its own factor of mean 1.

    Tasks are drawn in the order of their numbers, by training step, micro-batch and phase, and messages from another
    stream: so a task's factor depends on no schedule, link or other run. Where steps have
    unlike numbers of micro-batches, factors are drawn as if each had the most, so that no step changes those of others.
    Where the number of a round's is found in the run, each device has a stream of its own.
    """
    result = np.tile(duration, (len(runs), 1))
    sent = program.message_nodes
    for text, stream, nodes in (
        (disorder.jitter, _TASK_STREAM, slice(sent.start)),
        (disorder.link_jitter, _MESSAGE_STREAM, sent),
    ):
        width, count, rows = result[0, nodes].size, *_drawn_rows(program, stream)
        if not (text and width):
            continue
        name, variation = read_jitter("jitter", text)
        step = max(1, _DRAWN_AT_ONCE // width)
        for low in range(0, len(runs), step):
            if program.thrown_away and stream == _TASK_STREAM:
                drawn = np.concatenate([_drawn_by_device(program, seed, run) for run in runs[low : low + step]])
            else:
                drawn = np.concatenate([uniforms(seed, run, stream, count)[rows] for run in runs[low : low + step]])
            result[low : low + step, nodes] *= DISTRIBUTIONS[name][0](drawn, variation).reshape(-1, width)
    if disorder.link_jitter:
        result[:, sent.stop :] = program.parts.times(result[:, sent].T).T
    return result


def _drawn_by_device(program: Program, seed: int, run: int) -> Floats:
    """Draw a number for each task and update, in their devices' order: none depends on what another device does."""
    drawn = np.empty(len(program.tasks))
    for stream, first, after in (
        (_TASK_STREAM, 0, program.compute),
        (_UPDATE_STREAM, program.compute, len(program.tasks)),
    ):
        device = program.tasks.device[first:after]
        for number in range(program.devices):
            rows = first + np.flatnonzero(device == number)
            drawn[rows] = uniforms(seed, run, stream, len(rows), number)
    return drawn


def _drawn_rows(program: Program, stream: int) -> tuple[int, slice | Ints]:
    """Return how many factors are drawn for tasks or messages, and which of them these take, in order."""
    if stream == _MESSAGE_STREAM or program.m is not None:
        return len(program.tasks if stream == _TASK_STREAM else program.messages), slice(None)
    most, updates = int(program.counts.max()), len(program.tasks) - program.compute
    row = program.pass_step * most + program.pass_micro_batch
    task = row[:, None] * program.phases + np.arange(program.phases)
    count = program.steps * most * program.phases
    return count + updates, np.append(task, count + np.arange(updates))


def _refuse_parts_of_slots(disorder: Disorder) -> None:
    """Refuse disorder that would make parts of slots."""
    remedy = "give a --model, whose times are seconds"
    for option, text in (("jitter", disorder.jitter), ("link-jitter", disorder.link_jitter)):
        if text:
            raise RequestError(option, f"{text!r} makes parts of slots; {remedy}")
    for slow in disorder.slow:
        if slow.factor != int(slow.factor):
            raise RequestError("slow", f"{slow.factor:g} times makes parts of slots; take a whole factor, or {remedy}")


def _calendar(program: Program, disorder: Disorder, kind: np.dtype[Any]) -> Calendar | None:
    """Return when devices do nothing: a row for each that stops, and one for everything else."""
    stops = defaultdict(list)
    for stop in disorder.stop:
        at = kind.type(stop.at)
        stops[stop.device].append((at, never(kind) if stop.lasts is None else at + kind.type(stop.lasts)))
    rows = {device: merge_stops(pairs) for device, pairs in sorted(stops.items())}
    if not rows:
        return None
    at, until = (np.full((len(rows) + 1, max(map(len, rows.values()))), never(kind)) for _ in range(2))
    row = np.full(program.nodes, len(rows), dtype=np.int32)
    for k, (device, pairs) in enumerate(rows.items()):
        row[: len(program.tasks)][program.tasks.device == device] = k
        at[k, : len(pairs)], until[k, : len(pairs)] = zip(*pairs, strict=True)
    return Calendar(row, at, until)
