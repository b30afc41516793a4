"""The package against an independent evaluation of the specification, row by row, and against its facts."""

from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cdpsim
from cdpsim import Cluster, Trace
from cdpsim.cluster import Devices
from cdpsim.trace.table import Table
from tests.helpers.reference_slot_model import CYCLIC, SCHEDULES, Matrix, Reference, Row, Task, constant, largest

CATEGORIES = ("activations", "gradients", "parameters")
SIMULTANEOUS = tuple(name for name in SCHEDULES if name not in CYCLIC)
REPLICATED_CYCLIC = ("multi-cdp", "mp-cdp", "pp-cdp")
SIZES = range(1, 9)


def causal_rules(n: int) -> dict[str, str | Matrix]:
    """The named rules of cyclic timing and some matrices between them; on one stage v2 is DP."""
    newest, random = largest(n), Random(n)
    chessboard = tuple(tuple(newest[i][j] and (i + j) % 2 == 0 for j in range(n)) for i in range(n))
    coins = tuple(tuple(newest[i][j] and random.random() < 0.5 for j in range(n)) for i in range(n))
    matrices = {"all-stale": constant(n, False), "chessboard": chessboard, "coins": coins}
    return {"cdp-v1": "cdp-v1", "cdp-v2": "cdp-v2", **matrices, **({"dp": "dp"} if n == 1 else {})}


def cases(name: str, n: int) -> Iterator[tuple[str, Reference]]:
    """All rules and numbers of steps, each with what it is called."""
    for label, rule in (causal_rules(n) if name in CYCLIC else {"dp": "dp"}).items():
        for steps in range(1, 5):
            yield f"{name}-n{n}-{label}-T{steps}", Reference(name, n, steps, rule)


def run(reference: Reference, folder: Path) -> Trace:
    """Simulate the same request with the package; a matrix goes through a file, as on the command line."""
    rule = reference.rule
    if not isinstance(rule, str):
        path = folder / "rule.csv"
        path.write_text("".join(",".join(str(int(cell)) for cell in row) + "\n" for row in rule))
        rule = str(path)
    return cdpsim.simulate(reference.schedule, reference.n, steps=reference.steps, rule=rule)


def rows_of(columns: Table[Any]) -> list[tuple[Any, ...]]:
    cells = [map(str, column) if name == "dst" else column.tolist() for name, column in columns.items()]
    return list(zip(*cells, strict=True))


def memory_rows(trace: Trace, *categories: str) -> list[tuple[Any, ...]]:
    return [row for row in rows_of(trace.memory) if row[1] in categories]


def assert_same(what: str, expected: Iterable[tuple[Any, ...]], got: Iterable[tuple[Any, ...]]) -> None:
    """Compare rows as multisets, and name what is missing and what is too much."""
    wanted, found = Counter(map(tuple, expected)), Counter(map(tuple, got))
    missing, extra = sorted((wanted - found).elements()), sorted((found - wanted).elements())
    assert not missing and not extra, f"{what}: missing {missing[:8]}, unexpected {extra[:8]}"


def assert_agrees(reference: Reference, folder: Path, label: str = "") -> None:
    trace = run(reference, folder)
    assert_same(f"{label} tasks", reference.tasks, rows_of(trace.tasks))
    assert_same(f"{label} messages", reference.messages, rows_of(trace.messages))
    assert_same(f"{label} memory", reference.memory, memory_rows(trace, *CATEGORIES))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("n", range(1, 7))
def test_a_trace_is_what_the_specification_says(name: str, n: int, tmp_path: Path) -> None:
    """Under every rule that the schedule takes, for one to four steps."""
    for label, reference in cases(name, n):
        assert_agrees(reference, tmp_path, label)


@st.composite
def causal_requests(draw: st.DrawFn) -> Reference:
    n = draw(st.integers(1, 6))
    newest = largest(n)
    matrix = tuple(tuple(newest[i][j] and draw(st.booleans()) for j in range(n)) for i in range(n))
    return Reference(draw(st.sampled_from(CYCLIC)), n, draw(st.integers(1, 4)), matrix)


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(causal_requests())
def test_any_causal_rule_is_evaluated_as_the_specification_says(tmp_path: Path, reference: Reference) -> None:
    assert_agrees(reference, tmp_path)


def test_the_rows_of_a_trace_come_in_the_order_of_the_contract(tmp_path: Path) -> None:
    for name in SCHEDULES:
        reference = Reference(name, 4, 3, "cdp-v2" if name in CYCLIC else "dp")
        trace = run(reference, tmp_path)
        tasks = [Task(*row) for row in rows_of(trace.tasks)]
        order = [(t.start, t.device, "UFBW".index(t.kind), t.step, t.micro_batch, t.stage) for t in tasks]
        assert order == sorted(order)
        starts = trace.messages["start"].tolist()
        assert starts == sorted(starts)
        assert memory_rows(trace, *CATEGORIES) == [tuple(row) for row in reference.memory]


# Section 1


def simulated(name: str, n: int, steps: int = 3, **keywords: Any) -> tuple[Trace, list[Task]]:
    trace = cdpsim.simulate(name, n, steps=steps, **keywords)
    return trace, [Task(*row) for row in rows_of(trace.tasks)]


def held_per_slot(trace: Trace, category: str, slots: int) -> list[int]:
    """Return the bytes of a category that all devices together hold in each slot."""
    change = [0] * (slots + 1)
    before: dict[int, int] = {}
    for row in (Row(*row) for row in memory_rows(trace, category)):
        change[row.time] += row.size - before.get(row.device, 0)
        before[row.device] = row.size
    return list(accumulate(change))


def peak(trace: Trace, category: str, device: int) -> int:
    return max(row.size for row in (Row(*row) for row in memory_rows(trace, category)) if row.device == device)


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", CYCLIC)
def test_in_steady_state_each_stage_and_each_worker_runs_exactly_one_task(name: str, n: int) -> None:
    computations = [task for task in simulated(name, n)[1] if task.kind != "U"]
    for slot in range(2 * (n - 1), 2 * n * 3):
        now = [task for task in computations if task.start == slot]
        assert sorted(task.stage for task in now) == list(range(n))
        assert sorted(task.micro_batch for task in now) == list(range(n))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("name", CYCLIC)
def test_cyclic_timing_holds_the_same_activations_in_every_steady_slot(name: str, rule: str, n: int) -> None:
    trace, _ = simulated(name, n, rule=rule)
    makespan = 2 * n * 3 + 2 * (n - 1)
    assert trace.summary()["makespan"] == makespan
    held = held_per_slot(trace, "activations", makespan)
    assert set(held[2 * (n - 1) : 2 * n * 3]) == {n * (n + 1) // 2}


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", SIMULTANEOUS)
def test_simultaneous_timing_peaks_in_the_middle_of_each_training_step(name: str, n: int) -> None:
    trace, _ = simulated(name, n)
    assert trace.summary()["makespan"] == 2 * n * 3
    held = held_per_slot(trace, "activations", 2 * n * 3)
    peaks = [slot for slot, size in enumerate(held) if size == max(held)]
    assert max(held) == n * n
    assert peaks == [2 * n * t + slot for t in range(3) for slot in (n - 1, n)]


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_micro_batch_occupies_a_stage_as_long_as_lemma_1_says(name: str, n: int) -> None:
    tasks = {(task.kind, task.stage, task.micro_batch, task.step): task for task in simulated(name, n)[1]}
    for (kind, stage, *place), task in tasks.items():
        if kind == "F":
            back = tasks["B", stage, place[0], place[1]]
            assert back.end - task.start == 2 * (n - stage)
            assert back.device == task.device
            assert back.version == task.version


def steady_peak_on_one_lane(n: int, slot_order: str) -> int:
    """The most activations that one device holds while it works on the tasks of the steady slots, one at a time."""
    one_lane = Cluster(devices=(Devices(lanes=1),))
    trace, tasks = simulated("single-cdp", n, cluster=one_lane, slot_order=slot_order if n > 1 else None)
    grid = Reference("single-cdp", n, 3, "cdp-v2")

    def slot(task: Task) -> int:
        when = grid.forward if task.kind == "F" else grid.backward
        return when(task.micro_batch, task.stage, task.step)

    steady = [task for task in tasks if task.kind != "U" and 2 * (n - 1) <= slot(task) < 2 * n * 3]
    low, high = min(task.start for task in steady), max(task.end for task in steady)
    assert high - low == len(steady), "one after another, without a gap"
    rows = [Row(*row) for row in memory_rows(trace, "activations")]
    entering = [row.size for row in rows if row.time <= low][-1]
    return max([entering] + [row.size for row in rows if low <= row.time < high])


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
def test_what_one_lane_holds_depends_on_the_order_inside_a_slot(n: int) -> None:
    assert steady_peak_on_one_lane(n, "forward-first") == n * (n + 1) // 2
    assert steady_peak_on_one_lane(n, "backward-first") == -(-n * n // 2)


# Section 2


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
def test_multi_gpu_v1_keeps_two_versions_on_the_updater_and_one_elsewhere(n: int) -> None:
    trace, _ = simulated("multi-cdp", n, rule="cdp-v1")
    assert [peak(trace, "parameters", device) for device in range(n)] == [n] * (n - 1) + [2 * n]


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
def test_multi_gpu_v2_keeps_one_version_everywhere(n: int) -> None:
    trace, _ = simulated("multi-cdp", n, rule="cdp-v2")
    assert [peak(trace, "parameters", device) for device in range(n)] == [n] * n


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
def test_a_pipeline_with_v2_keeps_two_versions_on_every_stage_but_the_last(n: int) -> None:
    trace, _ = simulated("pp-cdp", n, rule="cdp-v2")
    assert [peak(trace, "parameters", device) for device in range(n)] == [2] * (n - 1) + [1]


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
def test_the_mean_staleness_is_that_of_the_rule(n: int) -> None:
    expected = {"dp": Fraction(0), "cdp-v1": Fraction(1), "cdp-v2": Fraction(n - 1, 2 * n)}
    for name in SCHEDULES:
        for rule in ("cdp-v1", "cdp-v2") if name in CYCLIC else ("dp",):
            trace, tasks = simulated(name, n, rule=rule)
            read = [task.step - task.version for task in tasks if task.kind == "F" and task.step >= 1]
            assert Fraction(sum(read), len(read)) == expected[rule]
            assert trace.summary()["mean_staleness"] == float(expected[rule])


def test_the_dp_rule_is_refused_where_it_is_not_causal() -> None:
    with pytest.raises(cdpsim.RequestError):
        cdpsim.simulate("multi-cdp", 2, rule="dp")
    for rule in ("cdp-v1", "cdp-v2"):
        with pytest.raises(cdpsim.RequestError):
            cdpsim.simulate("multi-dp", 2, rule=rule)


# Section 3


def messages(trace: Trace) -> list[dict[str, Any]]:
    names = list(trace.messages.keys())
    return [dict(zip(names, row, strict=True)) for row in rows_of(trace.messages)]


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_partial_sums_take_as_many_messages_as_section_3_counts(rule: str, n: int) -> None:
    expected = {"multi-cdp": n * (n - 1), "mp-cdp": n * (n - 1) // 2, "pp-cdp": 0}
    for name in REPLICATED_CYCLIC:
        sent = Counter(m["step"] for m in messages(simulated(name, n, rule=rule)[0]) if m["content"] == "gradient")
        assert [sent[t] for t in range(3)] == [expected[name]] * 3


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_each_worker_of_cyclic_zero_receives_a_state_so_often_in_a_training_step(rule: str, n: int) -> None:
    moves = messages(simulated("zero-cdp", n, steps=4, rule=rule)[0])
    assert {m["content"] for m in moves} <= {"state"}
    for worker in range(n):
        for t in range(1, 4):
            begin = 2 * n * t + 2 * worker
            arrived = [m for m in moves if m["dst"] == str(worker) and begin <= m["end"] < begin + 2 * n]
            assert len(arrived) == 2 * (n - 1)


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("name", SCHEDULES)
def test_both_engines_give_the_same_trace(name: str, n: int) -> None:
    for rule in ("cdp-v1", "cdp-v2") if name in CYCLIC else ("dp",):
        fast, simpy = (simulated(name, n, rule=rule, engine=engine)[0] for engine in ("fast", "simpy"))
        for table in ("tasks", "messages", "memory"):
            one, other = getattr(fast, table), getattr(simpy, table)
            assert list(one) == list(other)
            assert rows_of(one) == rows_of(other)
        assert fast.summary() == simpy.summary()


# Section 4


def reference_cells(name: str, n: int) -> dict[str, Fraction]:
    """Those cells of Table 1 that can be counted on the reference's own tasks, messages and memory."""
    run = Reference(name, n, 3, "cdp-v2" if name in CYCLIC else "dp")
    low, high = (2 * (n - 1), 2 * n * 3) if name in CYCLIC else (0, 2 * n * 3)
    copies: Counter[str] = Counter()
    for message in run.messages:
        number = message.dst.count("|") or 1
        if message.step == (0 if message.content == "parameters" else 1):
            copies[message.content] += number
            copies["parameters"] += number if message.op == "all_reduce" else 0
    share = Fraction(1, n * n)
    return {
        "activations": Fraction(max(row.size for row in run.memory if row.category == "activations"), n),
        "gradient_volume": copies["gradient"] * share,
        "parameter_volume": (copies["state"] if name == "zero-cdp" else copies["parameters"]) * share,
        "boundary_volume": Fraction(copies["activation"], n * max(n - 1, 1)),
        "gpus": Fraction(len({task.device for task in run.computations if low <= task.start < high})),
    }


@pytest.mark.parametrize("n", range(1, 7))
def test_table_1_agrees_with_the_reference(n: int) -> None:
    rows = {row["schedule"]: row for row in cdpsim.table1(n)}
    assert tuple(rows) == SCHEDULES
    for name, row in rows.items():
        assert row["agree"], name
        for quantity, value in reference_cells(name, n).items():
            assert (name, quantity, row[quantity]["simulated"]) == (name, quantity, value)
