"""Cyclic schedules at a given batch: m = K * N micro-batches, K for each of N workers, one after another.

Worker w takes micro-batches w, w + N, ...; each of them starts two slots after the one before. So micro-batch i of step
t starts at slot 2mt + 2i, and all that the paper says of one worker's micro-batch holds of the K together.
"""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpsim import Request, compare, simulate
from cdpsim.errors import RequestError
from cdpsim.invariants import violations
from cdpsim.program import Kind
from cdpsim.request.options import EngineName
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES
from cdpsim.schedules.order import CYCLIC
from tests.conftest import Command
from tests.helpers.command_line import refuse

NAMES = [name for name, schedule in SCHEDULES.items() if schedule.order is CYCLIC]
SHARED = [name for name in NAMES if name != "pp-cdp"]  # whose micro-batches workers share
STEPS = 3
ENGINES: tuple[EngineName, ...] = ("fast", "simpy")
every_name = pytest.mark.parametrize("name", NAMES)
every_size = pytest.mark.parametrize(("n", "each"), [(1, 3), (2, 2), (3, 2), (4, 3), (5, 2)])


def passes(run: Run) -> dict[str, np.ndarray]:
    """The columns of forwards and backwards, without updates."""
    compute = slice(run.program.compute)
    columns = {name: getattr(run.program.tasks, name)[compute] for name in ("kind", "stage", "micro_batch", "step")}
    return columns | {"version": run.program.tasks.version[compute], "device": run.program.tasks.device[compute]}


def sent(run: Run, *contents: str) -> list[int]:
    """The messages with these contents of each step's own gradients and versions, but the last step's."""
    of_step = Counter(message.step for message in run.messages if message.content in contents)
    return [of_step[t] for t in range(STEPS - 1)]


@every_name
@every_size
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2", "newest"])
def test_micro_batches_are_two_slots_apart(name: str, n: int, each: int, rule: str) -> None:
    """The period is 2NK slots, and the run ends 2(N - 1) slots after T of them; by both engines."""
    m = n * each
    runs = [simulate(name, n, m=m, steps=STEPS, rule=rule, engine=engine) for engine in ENGINES]
    for run in runs:
        rows = passes(run)
        forwards = rows["kind"] == Kind.F
        phase = np.where(forwards, rows["stage"], 2 * n - 1 - rows["stage"])
        begin = 2 * m * rows["step"] + 2 * rows["micro_batch"] + phase
        assert np.array_equal(run.start[: run.program.compute], begin)
        assert run.end.max() == 2 * m * STEPS + 2 * (n - 1)
        assert run.summary()["period"] == 2 * m
        assert violations(run) == {}


@pytest.mark.every_case
@every_name
@every_size
def test_activations_are_flat(name: str, n: int, each: int) -> None:
    """At N(N + 1) / 2 in every steady slot, as with one micro-batch for each worker: half of data parallelism's."""
    run = simulate(name, n, m=n * each, steps=STEPS)
    slots = 2 * n * each * STEPS
    change, before = [0] * (slots + 2 * n), dict[int, int]()
    for row in run.memory:
        if row.category == "activations":
            change[int(row.time)] += row.size - before.get(row.device, 0)
            before[row.device] = row.size
    assert set(list(accumulate(change))[2 * (n - 1) : slots]) == {n * (n + 1) // 2}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["multi-cdp", "zero-cdp", "pp-cdp", "single-cdp"])
@every_size
def test_all_devices_are_busy(name: str, n: int, each: int) -> None:
    (row,) = compare([name], n=n, m=n * each).measured
    assert (row.bubble, row.step, row.devices) == (0, 2 * n * each, 1 if name == "single-cdp" else n)


@pytest.mark.every_case
@every_size
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_messages_do_not_grow_with_the_batch(n: int, each: int, rule: str) -> None:
    """Each device sums its own first: k - 1 partial sums of a stage on k devices, whatever K is; and k - 1 versions."""
    for name, many in (("multi-cdp", n * (n - 1)), ("mp-cdp", n * (n - 1) // 2), ("pp-cdp", 0), ("single-cdp", 0)):
        run = simulate(name, n, m=n * each, steps=STEPS, rule=rule)
        assert sent(run, "gradient") == [many] * (STEPS - 1)
        assert sent(run, "parameters")[0] == many
    carried = simulate("zero-cdp", n, m=n * each, steps=STEPS, rule=rule)  # a state goes to each use, however many
    assert len([one for one in carried.messages if one.step == 1]) == each * 2 * n * (n - 1)


@pytest.mark.every_case
@pytest.mark.parametrize("name", SHARED)
@every_size
def test_a_worker_reads_in_a_step_what_its_first_micro_batch_reads(name: str, n: int, each: int) -> None:
    """Of CDP-v2 theta_t where w + j >= N - 1; the age is (N - 1) / 2N steps in the mean."""
    run = simulate(name, n, m=n * each, steps=STEPS)
    rows = passes(run)
    older = rows["micro_batch"] % n + rows["stage"] < n - 1
    assert np.array_equal(rows["version"], np.maximum(rows["step"] - older, 0))
    assert run.summary()["mean_staleness"] == (n - 1) / (2 * n)


@pytest.mark.every_case
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("more", [1, 2, 5])
def test_a_pipeline_takes_any_batch_by_the_largest_causal_rule(n: int, more: int) -> None:
    """A forward reads theta_t where that is there when it starts; else theta_{t-1}: (N - 1) / 2m steps in the mean."""
    m = n + more
    run = simulate("pp-cdp", n, m=m, steps=STEPS)
    rows, made = passes(run), {}
    for task in run.tasks:
        if task.kind == "U":
            made[task.step + 1, task.stage] = task.end
    for task in run.tasks:
        if task.kind == "F" and task.step:
            newest = task.step if made[task.step, task.stage] <= task.start else task.step - 1
            assert task.version == newest
    assert rows["device"].tolist() == rows["stage"].tolist()
    assert run.request["rule"] == "newest"
    assert run.summary()["mean_staleness"] == pytest.approx((n - 1) / (2 * m))
    assert run.summary()["period"] == 2 * m
    assert violations(run) == {}


def test_cdp_v2_is_the_largest_causal_rule_for_first_micro_batches() -> None:
    """One more fresh (i, j) of these reads what is not there; of a worker's later micro-batches it does not."""
    n, m = 3, 6
    i, j = np.indices((m, n))
    lags = (i % n + j < n - 1).astype(int)
    assert simulate("multi-cdp", n, m=m, rule=lags.tolist()).tasks == simulate("multi-cdp", n, m=m).tasks
    for row, stage in zip(*np.nonzero(lags), strict=True):
        fresher = lags.copy()
        fresher[row, stage] = 0
        if row < n:
            with pytest.raises(RequestError, match=rf"\(i={row}, j={stage}\) would read theta_t before it exists"):
                simulate("multi-cdp", n, m=m, rule=fresher.tolist())
        else:
            assert violations(simulate("multi-cdp", n, m=m, rule=fresher.tolist())) == {}


def test_a_batch_of_n_changes_nothing() -> None:
    """Given or not; and a request with another one is recorded and made again."""
    for name in NAMES:
        assert Request(name, 4, m=4).to_builtins() == Request(name, 4).to_builtins()
        request = Request(name, 4, m=8)
        again = Request.from_builtins(request.to_builtins())
        assert (again.shape, again.rule) == (request.shape, request.rule)


def test_lanes_are_of_workers() -> None:
    """One device runs N micro-batches at once, not m."""
    run = simulate("single-cdp", 3, m=9)
    assert set(run.program.tasks.lane[: run.program.compute].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("multi-cdp -n 4 -m 6", "m: multi-cdp needs a multiple of its n=4 workers; m=6, so give 4 or 8"),
        ("mp-cdp -n 4 -m 3", "m: mp-cdp needs a multiple of its n=4 workers; m=3, so give 4"),
        ("pp-cdp -n 4 -m 3", "m: pp-cdp needs m >= n, to keep its stages busy; m=3, n=4"),
    ],
)
def test_other_batches_are_refused(asked: str, problem: str, command: Command, here: Path) -> None:
    refuse(command, here, f"simulate {asked}", problem)


def test_replicas_of_a_pipeline_have_batches_of_their_own() -> None:
    """Two of five micro-batches each; one all-reduce a step and stage."""
    asked: dict[str, Any] = {"m": 5, "replicas": 2, "steps": STEPS}
    run = simulate("pp-cdp", 3, **asked)
    assert [message.op for message in run.messages if message.content == "gradient" and message.step == 1] == [
        "all_reduce"
    ] * 3
    assert violations(run) == {}
