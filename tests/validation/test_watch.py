"""Readings of a device that plays by hand: slot by slot, and times of tasks."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from cdpsim.program import Category
from validation.replay import watch
from validation.replay.watch import Meter, Reading, Stopwatch, TaskInterval, Watch

CPU = torch.device("cpu")


def held(**sizes: int) -> list[int]:
    """Bytes by category, 0 where nothing is said."""
    return [sizes.pop(category.name.lower(), 0) for category in Category]


def numbers(bytes_: int) -> torch.Tensor:
    """A new tensor of that many bytes."""
    return torch.empty(bytes_, dtype=torch.uint8)


def test_a_task_reads_its_peak_and_what_is_between_tasks_its_level() -> None:
    """A slot of one task, two slots of waiting, and a task that lets go of what the first one made."""
    meter = Meter(CPU)
    with meter.playing():
        meter.turn(0)
        with meter.task(0):
            kept = numbers(10)
            numbers(100)
        meter.turn(3)
        with meter.task(1):
            more = numbers(5)
            del kept
        meter.turn(5)
        del more
    assert meter.readings == [
        Reading(0, 1, held(activations=110)),
        Reading(1, 3, held(activations=10)),
        Reading(3, 4, held(activations=15)),
        Reading(4, 5, held(activations=5)),
    ]


def test_one_slot_is_read_once() -> None:
    """Several messages of a slot are nothing to read, nor is a task that follows another at once."""
    meter = Meter(CPU)
    with meter.playing():
        for node in range(2):
            meter.turn(node)
            meter.turn(node)
            with meter.task(node):
                pass
    assert [(reading.begin, reading.end) for reading in meter.readings] == [(0, 1), (1, 2)]


def test_what_is_held_counts_under_its_category() -> None:
    meter = Meter(CPU)
    with meter.playing():
        theta, gradient, state, arrived, other = (numbers(size) for size in (1, 2, 4, 8, 16))
        for tensor, category in (
            (theta, Category.PARAMETERS),
            (gradient, Category.GRADIENTS),
            (state, Category.OPTIMIZER),
            (arrived, Category.COMMUNICATION),
        ):
            meter.holds(tensor, category)
        meter.turn(1)
        meter.holds(arrived, Category.ACTIVATIONS)
        del other
        meter.turn(2)
    assert meter.readings == [
        Reading(0, 1, held(activations=16, communication=8, gradients=2, optimizer=4, parameters=1)),
        Reading(1, 2, held(activations=8, gradients=2, optimizer=4, parameters=1)),
    ]


def test_what_another_device_makes_is_not_seen() -> None:
    """Of two that are played in one process, each sees its own."""
    one, other = Meter(CPU), Meter(CPU)
    with one.playing():
        mine = numbers(3)
    with other.playing():
        theirs = numbers(7)
        other.turn(1)
    with one.playing():
        one.turn(1)
    assert [meter.readings[0].held for meter in (one, other)] == [held(activations=3), held(activations=7)]
    del mine, theirs


def test_a_peak_of_each_category_is_its_own() -> None:
    """Parameters that go before activations come are not fewer for it."""
    meter = Meter(CPU)
    with meter.playing():
        theta = numbers(6)
        meter.holds(theta, Category.PARAMETERS)
        with meter.task(0):
            del theta
            numbers(4)
    assert meter.readings == [Reading(0, 1, held(activations=4, parameters=6))]


def test_a_stopwatch_gives_each_task_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 4.0, 6.0])
    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    stopwatch = Stopwatch(CPU)
    for node in (7, 3):
        stopwatch.turn(node)
        with stopwatch.playing(), stopwatch.task(node):
            stopwatch.holds(numbers(1), Category.PARAMETERS)
    assert stopwatch.spans == [TaskInterval(7, 1.0, 1.5), TaskInterval(3, 4.0, 6.0)]


@pytest.mark.parametrize("make", [lambda: Meter(CPU), lambda: Stopwatch(CPU)], ids=["meter", "stopwatch"])
def test_a_task_that_fails_is_not_read(make: type[Watch]) -> None:
    """Its error goes on, and nothing of it is taken for a reading."""
    seen = make()
    with pytest.raises(ZeroDivisionError), seen.playing(), seen.task(0):
        raise ZeroDivisionError
    assert vars(seen).get("readings", []) == vars(seen).get("spans", []) == []
