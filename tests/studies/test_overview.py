"""Six lines of a run: their metrics are those of the papers' closed forms."""

from typing import Any

import numpy as np
import pytest

from cdpsim import simulate
from cdpsim.errors import TooLarge
from cdpsim.studies.compare import overview
from tests.helpers.profiles import A100, profiled


@pytest.mark.parametrize(("n", "m"), [(4, 8), (3, 5)])
def test_a_pipeline_s_figures_are_the_papers(n: int, m: int) -> None:
    """Of 1F1B: m + n - 1 forwards and backwards, a bubble of (n-1)/(m+n-1), at most n stashes, 2m messages a link."""
    assert list(overview(simulate("1f1b", n, m=m)).items()) == [
        ("run", f"1f1b: {n} stages, {m} micro-batches, {n} devices; in slots"),
        ("step time", f"{2 * (m + n - 1)} slots, certified; {m / (2 * (m + n - 1)):.4g} micro-batches per slot"),
        (
            "bubble",
            f"{100 * (n - 1) / (m + n - 1):.1f} % of the devices' time; 0.0 % is waiting for messages",
        ),
        # and the stage's parameters and gradients
        ("peak memory", f"{n + 2} stage-activations on device 0; activations up to {n} stage-activations"),
        ("staleness", "0, every forward reads the newest version"),
        ("messages", f"{2 * (n - 1) * m} a step, {2 * (n - 1) * m} stage-activations sent"),
    ]


def test_staleness_is_the_mean_lag() -> None:
    """Of N² readings of CDP-v2, N (N-1) / 2 are one step old."""
    assert overview(simulate("pp-cdp", 4))["staleness"].startswith(f"{6 / 16} steps, ")


@pytest.mark.parametrize("n", [4, 6])
def test_a_run_that_does_not_reach_steady_state_says_so(n: int) -> None:
    """Of PipeDream in steady state: stage 0 has n micro-batches on their way, each with its version, and a gradient.

    After few steps there are fewer versions: none is made before the first backward, in slot 2 n - 1.
    """
    few, many = simulate("pipedream", n, steps=3), simulate("pipedream", n, steps=5 * n)
    one = overview(simulate("pipedream", n, steps=1))
    assert (few.reaches_steady_state, many.reaches_steady_state) == (False, True)
    assert overview(few)["step time"].startswith("2 slots, certified, later than these 3 steps; ")
    assert one["step time"].startswith("2 slots, certified, later than this step; ")
    peak = f"{2 * n + 1} stage-activations on device 0"
    assert overview(many)["peak memory"].startswith(f"{peak}; activations up to {n} ")
    own = max(row["total"] for row in few.summary()["peak_memory"])
    assert overview(few)["peak memory"].startswith(f"{peak}, {own} stage-activations in these 3 steps; activations ")
    assert own < 2 * n + 1
    assert [row["total"] for row in few.summary()["steady_peak_memory"]] == [2 * (n - j) + 1 for j in range(n)]
    assert few.summary()["steady_peak_memory"] == many.summary()["peak_memory"]
    assert few.summary()["reaches_steady_state"] is False
    assert not {"reaches_steady_state", "steady_peak_memory"} & many.summary().keys()


def test_one_is_not_many() -> None:
    assert overview(simulate("single-dp", 1))["run"] == "single-dp: 1 stage, 1 micro-batch, 1 device; in slots"


def test_real_costs_have_units() -> None:
    """The step of one device is all its work, by the shipped files' own figures."""
    run = simulate("multi-dp", 1, m=1, model=profiled("gpt2"), cluster=A100)
    lines = overview(run)
    assert lines["run"].endswith("gpt2, adam, mixed precision, 8 samples a micro-batch, bf16, a100-nodes")
    device = run.request.cluster.devices[0]
    work = sum(float(stage.forward) + float(stage.backward) for stage in run.request.model.stages)
    assert device.speeds is not None
    speed = device.speeds.known["bf16"] * (device.achieved or 1)
    assert lines["step time"].startswith(f"{1e3 * work / speed:.4g} ms, certified; {8 * speed / work:.4g} samples per")
    assert " GB of 80 GB on device 0; activations up to " in lines["peak memory"]
    assert lines["messages"] == "0 a step, 0 B sent"


def test_many_runs_have_quantiles() -> None:
    """Those of runs that are made one by one."""
    request: Any = {"n": 2, "steps": 8, "model": "gpt2", "cluster": "a100-nodes", "jitter": "uniform:0.1"}
    text = overview(simulate("1f1b", **request), runs=20)["step time"]
    periods = [simulate("1f1b", **request, run=number).summary()["period"] for number in range(20)]
    low, high = 1e3 * np.quantile(periods, [0.05, 0.95])
    assert text.endswith(f"; {low:.4g} ms to {high:.4g} ms in 90 % of the runs")


@pytest.mark.parametrize("schedule", ["pipedream", "dpu", "wp", "acco"])
def test_without_room_for_a_steady_state_metrics_are_of_the_steps_given(schedule: str) -> None:
    """They are the same with each limit and each engine that leave it out, and all the others give the steady state."""
    options: dict[str, Any] = {"n": 3} if schedule == "pipedream" else {"n": 1, "m": 2, "replicas": 2}
    facts = (
        "period",
        "period_is",
        "bubble",
        "mean_staleness",
        "peak_memory",
        "steady_peak_memory",
        "reaches_steady_state",
    )
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for engine in ("fast", "simpy"):
        for limit in np.geomspace(5e3, 5e6, 13).astype(int).tolist():
            try:
                run = simulate(schedule, **options, steps=1, engine=engine, max_memory=limit)
            except TooLarge:  # too little for the run itself
                continue
            summary = run.summary()
            found[run.steady_state.is_steady].append({fact: summary.get(fact) for fact in facts})
    steady = simulate(schedule, **options, steps=1).summary()
    short = found[False][0]
    assert all(each == {fact: steady.get(fact) for fact in facts} for each in found[True])
    assert len(found[True]) > 1 < len(found[False])
    assert all(each == short for each in found[False])
    assert (short["period_is"], short["reaches_steady_state"], short["mean_staleness"]) == ("not steady", False, 0)
    assert short["steady_peak_memory"] is None
    assert (steady["mean_staleness"] > 0) == (schedule in ("pipedream", "dpu"))


def test_a_run_that_is_not_steady_says_why() -> None:
    room = simulate("pipedream", 6, steps=1, max_memory=20_000)
    assert overview(room)["step time"].startswith("12 slots, not steady (no room for more steps); ")
    assert not room.reaches_steady_state
    stop = simulate("acco", 1, replicas=2, steps=1, stop=["0:9"])
    assert overview(stop)["step time"].startswith("4 slots, not steady (more steps never end); ")


def test_a_run_that_ends_before_a_stop_is_as_without_it() -> None:
    """A single pass through six stages and back takes 12 slots; that later steps would not end does not matter."""
    stopped = simulate("pipedream", 6, steps=1, stop=["0:16"])
    assert (stopped.makespan, stopped.steady_state.period) == (12, 12)
    vertical = simulate("pipedream", 6, rule="vertical-sync", steps=1, stop=["0:16"])
    assert vertical.summary()["mean_staleness"] == 5
