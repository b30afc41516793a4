"""Many runs: the same as single ones to the last bit, and distributed as order statistics say."""

import csv
import json
import math
from pathlib import Path
from statistics import quantiles as library_quantiles
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, RequestError, Stage, load, simulate
from cdpsim.cluster import Link
from cdpsim.errors import Stalled
from cdpsim.studies import montecarlo
from cdpsim.studies.montecarlo import quantiles, sample_runs
from tests.conftest import Command
from tests.helpers.command_line import FILES, content, refuse
from tests.helpers.every_row import every_row
from tests.helpers.strategies import requests, streamed_requests, taken

TINY = 1e-30


def one_task(k: int) -> Model:
    """A model of k stages of which only the first forward takes time: 1 s."""
    rest = Stage(forward=TINY, backward=TINY)
    return Model(stages=(Stage(forward=1.0, backward=TINY), *[rest] * (k - 1)))


@settings(max_examples=40)
@given(
    requests(most=4, timed=True) | streamed_requests(most=3, timed=True),
    st.sampled_from(["uniform:0.5", "exponential:1", "lognormal:0.4"]),
    st.integers(0, 3),
)
def test_each_of_many_runs_is_the_single_run_of_that_number(request: dict[str, Any], jitter: str, seed: int) -> None:
    """To the last bit, with stops, slow devices, links that vary; also where runs are swept a few at a time."""
    asked: dict[str, Any] = {
        "jitter": jitter,
        "link_jitter": "uniform:0.2",
        "stop": ["0:1s:3s", "0:20s:1s"],
        "slow": ["0:1.5"],
    }
    asked = {name: asked[name] for name in taken(request | asked) if name in asked}
    found = sample_runs(simulate(**request, **asked, seed=seed), 3)
    for run in range(3):
        alone = simulate(**request, **asked, seed=seed, run=run).summary()
        assert found.makespan[run] == alone["makespan"]
        assert found.period[run] == alone["period"]
    steady = simulate(**request, **{name: asked[name] for name in ("stop", "slow")}).summary()
    assert found.steady_period == steady["period"]


def test_a_run_whose_steps_end_at_one_moment_is_averaged_over_all_of_them() -> None:
    """Both steps wait for one message of 30 s in one of these runs, and not in the others."""
    stage = Stage(forward=1.0, backward=2.0, weight_backward=1.0, activation=1, boundary=1, parameters=1)
    asked: dict[str, Any] = {"m": 4, "steps": 2, "rule": "cdp-v1", "model": Model(stages=(stage, stage)), "seed": 1}
    asked |= {"jitter": "exponential:1", "link_jitter": "uniform:0.2", "stop": ["0:1s:3s", "0:20s:1s"]}
    cluster = Cluster(link=Link(latency=30.0))
    alone = [simulate("multi-cdp", **asked, slow=["0:1.5"], cluster=cluster, run=run) for run in range(3)]
    joined = [float(one.summary()["period"]) for one in alone]
    assert joined[1] == alone[1].makespan / 2
    for one in alone[:2]:  # of which the first is the one that says what is averaged
        assert sample_runs(one, 3).period.tolist() == joined


def test_runs_in_pieces_are_the_same_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are swept at once; and of twice as many the first ones are the same."""
    trace = simulate("multi-cdp", model=one_task(3), jitter="lognormal:0.5", seed=4)
    whole = sample_runs(trace, 50)
    monkeypatch.setattr(montecarlo, "DURATIONS_AT_ONCE", 1)
    assert sample_runs(trace, 100).makespan[:50].tolist() == whole.makespan.tolist()
    assert sample_runs(trace, 9).ends.tolist() == whole.ends[:9].tolist()


def expected_maximum(name: str, variation: float, k: int) -> tuple[float, float]:
    """The mean of the largest of k factors, and its standard deviation.

    Of k exponentials, as spacings are independent exponentials of means 1/k .. 1: the sum of 1/i, and of 1/i² the
    variance (Rényi 1953; David & Nagaraja 2003, Order Statistics, section 2.5). Of k uniform numbers, beta-distributed
    with k and 1: k/(k+1), and k/((k+1)² (k+2)) (the same, section 2.3).
    """
    if name == "exponential":
        mean, variance = (sum(1 / i**power for i in range(1, k + 1)) for power in (1, 2))
        return 1 - variation + variation * mean, variation * math.sqrt(variance)
    width = 2 * math.sqrt(3) * variation
    return 1 - width / 2 + width * k / (k + 1), width * math.sqrt(k / ((k + 1) ** 2 * (k + 2)))


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "variation"), [("exponential", 1.0), ("exponential", 0.2), ("uniform", 0.5)])
@pytest.mark.parametrize("k", [1, 2, 5, 16])
def test_a_step_of_data_parallelism_lasts_as_long_as_its_slowest_device(name: str, variation: float, k: int) -> None:
    """One random task on each of k devices, then all wait: the largest of k factors, step by step independent.

    The mean over 2,000 runs is within four of its standard errors; so is that of a step in the run's last half.
    """
    runs, steps = 2000, 2
    trace = simulate("multi-dp", model=one_task(k), steps=steps, jitter=f"{name}:{variation}", seed=1)
    found = sample_runs(trace, runs)
    mean, deviation = expected_maximum(name, variation, k)
    assert found.makespan.mean() == pytest.approx(steps * mean, abs=4 * deviation * math.sqrt(steps / runs))
    assert found.makespan.std() == pytest.approx(deviation * math.sqrt(steps), rel=0.1)
    # Of a distribution function F, the largest of k has F^k: a step is at most x in F(x)^k of the runs.
    first = sample_runs(simulate("multi-dp", model=one_task(k), steps=1, jitter=f"{name}:{variation}", seed=1), runs)
    x = 1 + 0.4 * variation
    below = 1 - math.exp(-(x - 1 + variation) / variation) if name == "exponential" else (0.4 / math.sqrt(3) + 1) / 2
    share = below**k
    assert (first.makespan <= x).mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / runs))


def test_on_one_device_times_add_up() -> None:
    """24 tasks of 1 s whose factors vary by 0.3, in one lane: 24 on average, with a variance of 24 · 0.09."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0),) * 2)
    found = sample_runs(
        simulate("single-dp", model=model, cluster=Cluster(), steps=3, jitter="lognormal:0.3", seed=2), 3000
    )
    expected = 24
    assert found.makespan.mean() == pytest.approx(expected, abs=4 * math.sqrt(expected * 0.09 / 3000))
    assert found.makespan.var() == pytest.approx(expected * 0.09, rel=0.12)


def test_quantiles_are_those_of_the_library() -> None:
    """Inclusive, as numpy interpolates; the mean by exact summation."""
    values = np.random.default_rng(0).lognormal(size=57)
    cuts = library_quantiles(values.tolist(), n=20, method="inclusive")
    found = quantiles(values)
    assert [found[name] for name in ("5%", "25%", "50%", "75%", "95%")] == pytest.approx(
        [cuts[k] for k in (0, 4, 9, 14, 18)]
    )
    assert (found["min"], found["max"]) == (values.min(), values.max())
    assert found["mean"] == math.fsum(values.tolist()) / 57
    assert list(found) == ["min", "5%", "25%", "50%", "75%", "95%", "max", "mean"]


def test_one_step_is_as_long_as_its_run() -> None:
    """Of two tasks at a time the longer one; without chance 1 s and what the short ones take."""
    found = sample_runs(simulate("multi-dp", model=one_task(2), steps=1, jitter="uniform:0.1"), 5)
    assert found.period.tolist() == found.makespan.tolist()
    assert found.steady_period == pytest.approx(1 + 3 * TINY)


def test_runs_that_do_not_end_are_told() -> None:
    """Device 1 stops for good at 2 s: where chance has it done by then, the run ends."""
    trace = simulate("multi-dp", model=one_task(2), steps=1, jitter="exponential:1", stop=["1:2s"], seed=3)
    stuck = [run for run in range(40) if not _ends(run)]
    with pytest.raises(Stalled, match=rf"{len(stuck)} of 40 runs do not end, the first of them run {stuck[0]} "):
        sample_runs(trace, 40)
    assert 0 < len(stuck) < 40


def _ends(run: int) -> bool:
    try:
        simulate("multi-dp", model=one_task(2), steps=1, jitter="exponential:1", stop=["1:2s"], seed=3, run=run)
    except Stalled:
        return False
    return True


def test_what_cannot_be_run_often_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="runs: nothing is random, so that all runs are alike; give --jitter"):
        sample_runs(simulate("multi-dp", 3), 5)
    trace = simulate("multi-dp", model=one_task(3), jitter="uniform:0.1")
    with pytest.raises(RequestError, match=r"runs: 1,000,000,000,000 runs keep 128 bytes each, .* [\d,]+ would fit"):
        sample_runs(trace, 10**12)
    monkeypatch.setattr(montecarlo, "free_bytes", lambda: 2 * 128 * 10)
    assert len(sample_runs(trace, 10).makespan) == 10
    with pytest.raises(RequestError, match="; 10 would fit"):
        sample_runs(trace, 11)
    trace.save(tmp_path / "trace")
    with pytest.raises(RequestError, match="a trace from files has no run behind it"):
        sample_runs(load(tmp_path / "trace"), 5)


def test_a_cluster_s_disorder_is_drawn_as_often(here: Path) -> None:
    (here / "wild.toml").write_text('[link]\nbandwidth = "1 GB/s"\n[disorder]\nlink_jitter = "lognormal:1"\n')
    found = sample_runs(simulate("multi-dp", model=Path("toy.toml"), cluster=Cluster.load("wild.toml")), 20)
    assert len(set(found.makespan.tolist())) == 20


# The command line


def test_runs_are_written_beside_run_0(command: Command, here: Path) -> None:
    line = "simulate multi-cdp --model toy.toml --cluster box.toml --jitter lognormal:0.2 --seed 7"
    assert command(*line.split(), "-o", "many", "--runs", 30) == (0, "", "")
    assert command(*line.split(), "-o", "one") == (0, "", "")
    many, one = content(here / "many"), content(here / "one")
    assert sorted(many) == sorted([*FILES, "runs.csv"])
    assert all(many[name] == one[name] for name in FILES if name != "summary.json")
    rows = list(csv.DictReader((here / "many/runs.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == [str(run) for run in range(30)]
    summary = json.loads((here / "many/summary.json").read_text())
    several = summary.pop("runs")
    assert summary == json.loads((here / "one/summary.json").read_text())
    assert (float(rows[0]["makespan"]), float(rows[0]["period"])) == (summary["makespan"], summary["period"])
    assert several["count"] == 30
    for column in ("makespan", "period"):
        values = np.array([float(row[column]) for row in rows])
        assert several[column]["50%"] == np.median(values)
        assert several[column]["95%"] == np.quantile(values, 0.95)
    command(*line.split(), "-o", "seventh", "--run", 7)
    seventh = json.loads((here / "seventh/summary.json").read_text())
    assert (repr(seventh["makespan"]), repr(seventh["period"])) == (rows[7]["makespan"], rows[7]["period"])
    command(*line.split(), "-o", "again", "--runs", 30)
    assert content(here / "again") == many


def test_no_run_outlives_what_it_was_written_beside(command: Command, here: Path) -> None:
    """A single run in the place of many leaves none of them there; a file that is not ours stays."""
    line = ["simulate", "multi-cdp", "--model", "toy.toml", "-o", "out", "--force"]
    command(*line, "--jitter", "uniform:0.1", "--runs", 3)
    assert (here / "out/runs.csv").exists()
    assert command(*line).code == 0
    assert not (here / "out/runs.csv").exists()
    (here / "out/runs.csv").write_text("mine\n")
    assert command(*line).code == 0
    assert (here / "out/runs.csv").read_text() == "mine\n"


REFUSALS = {
    "simulate multi-cdp --model toy.toml -o out --runs 3": "runs: nothing is random",
    "simulate multi-cdp --model toy.toml -o out --jitter uniform:0.1 --runs 0": "runs=0 must be at least 1",
    "simulate multi-cdp --model toy.toml -o out --jitter uniform:0.1 --runs many": "runs=many must be a whole number",
    "simulate multi-cdp --model toy.toml -o out --jitter uniform:0.1 --runs 100000000000": "would fit",
    "simulate multi-cdp --model toy.toml -o out --jitter uniform:0.1 --runs 3 --run 2": "runs: are those from 0 on",
    "simulate multi-cdp --model toy.toml -o out --jitter unifrom:0.1": "did you mean 'uniform'?",
    "simulate multi-cdp --model toy.toml -o out --slow 7:2": "slow: there is no device 7 for multi-cdp; take one",
    "simulate multi-cdp --model toy.toml -o out --stop 1:2": "stop: '2': no unit",
    "simulate multi-cdp -n 3 -o out --stop 1:2s": "stop: '2s' is not a whole number of slots",
    "simulate multi-cdp -n 3 -o out --jitter uniform:0.1": "jitter: 'uniform:0.1' makes parts of slots",
    "plot memory multi-dp -n 3 -o x.svg --runs 3": "runs: are drawn by `plot steps`, not by `plot memory`",
    "plot steps multi-dp -n 3 -o x.svg --runs 3": "runs: nothing is random",
    "compare multi-dp -n 3 --sort 95%": "unknown sort '95%'",
}


@every_row("line", REFUSALS)
def test_what_cannot_be_served_is_one_line(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, REFUSALS[line])


@pytest.mark.parametrize("name", ["dpu", "wp", "acco"])
def test_each_run_with_rounds_has_counts_of_its_own(name: str) -> None:
    """They are those of single runs, whose counts differ from run to run."""
    options: dict[str, Any] = {"replicas": 3, "steps": 6, "model": "gpt2", "cluster": "a100-nodes", "slow": {1: 1.5}}
    options["jitter"] = "lognormal:0.3"
    single = [simulate(name, run=number, **options) for number in range(4)]
    sampled = sample_runs(single[0], 4)
    assert sampled.makespan.tolist() == [run.makespan for run in single]
    assert len({run.request.counts for run in single}) > 1
    for ends, run in zip(sampled.ends, single, strict=True):
        tasks = run.tasks[run.tasks.step < 6]
        assert ends.tolist() == [tasks.end[tasks.step == step].max() for step in range(6)]
    assert sampled.period.tolist() == [run.steady_state.period for run in single]
