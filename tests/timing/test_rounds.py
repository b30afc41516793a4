"""Rounds without tasks say what runs say; requests that have none, or none that end, are refused."""

import csv
import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, rounds, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.cluster.topology import OVERLAPS
from cdpsim.errors import Stalled
from cdpsim.invariants import violations
from cdpsim.schedules.order import OverlappedRounds
from cdpsim.schedules.rule import ACCO
from cdpsim.schedules.state import BESIDE
from cdpsim.timing.round_times import counts_by_times
from cdpsim.trace import load_counts
from tests.conftest import Command
from tests.helpers.command_line import assert_refused
from tests.helpers.every_row import every_row

NAMES = ("dpu", "wp", "acco")


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Workers of whole numbers of seconds, alike or not, on links of whole bytes a second."""
    replicas = draw(st.integers(1, 4))
    stages = [
        Stage(
            forward=draw(st.integers(1, 4)),
            backward=draw(st.integers(1, 4)),
            update=draw(st.sampled_from([None, 1, 4])),
            parameters=size,
        )
        for size in draw(st.lists(st.sampled_from([0, 12, 24, 60]), min_size=1, max_size=2))
    ]
    schedule = draw(st.sampled_from(NAMES))
    slow = {worker: draw(st.integers(2, 5)) for worker in draw(st.sets(st.integers(0, replicas - 1)))}
    warm_up = {"warm_up": draw(st.integers(0, 1))} if schedule == "dpu" else {}
    link = Link(bandwidth=float(draw(st.integers(1, 60))))
    return {
        "schedule": schedule,
        "replicas": replicas,
        "m": draw(st.integers(1, 3)),
        "steps": draw(st.integers(2, 4)),
        "model": Model(stages=tuple(stages)),
        "cluster": Cluster(link=link),
        **({"slow": slow} if slow else {}),
        **warm_up,
    }


@given(requests())
@settings(max_examples=100, deadline=None)
def test_rounds_without_tasks_are_those_of_the_run(request: dict[str, Any]) -> None:
    """Every column to the bit."""
    found, ran = rounds(**request), simulate(**request).rounds
    assert ran is not None
    for name, column in ran.items():
        assert np.array_equal(found[name], column), name


def test_the_command_says_them_in_short(command: Command, tmp_path: Path) -> None:
    """Workers of one micro-batch in eight slots, and three that compute four in that time."""
    file = tmp_path / "rounds.csv"
    line = "rounds acco -n 1 --replicas 4 --slow 3:4 --steps 3 --format csv"
    out = command(*line.split(), "-o", str(file)).out
    assert list(csv.reader(out.splitlines())) == [
        ["rounds", "micro batches", "least", "most", "length", "communication"],
        ["0", "4", "1", "1", "8.0", "0.0"],
        ["1", "10", "1", "3", "8.0", "0.0"],
        ["2-5", "13", "1", "4", "8.0", "0.0"],
        ["6", "13", "1", "4", "", ""],
    ]
    command("simulate", *line.split()[1:-2], "-o", str(tmp_path / "run"))
    assert file.read_bytes() == (tmp_path / "run" / "rounds.csv").read_bytes()


NEVER = 'name = "w"\n[[stages]]\nforward = "1 us"\nbackward = "1 us"\nparameters = "100 GB"\n'


OPTIMIZER = "simulate acco --replicas 2 --model gpt2 --cluster a100-nodes --optimizer"
REFUSED = {
    "rounds acco -n 1 --replicas 2 -o F.svg": "F.svg: rounds are rows of CSV, and no picture; end its name in .csv",
    "rounds 1f1b -n 2": "schedule: 1f1b has no rounds",
    "rounds acco -n 1 --replicas 2 --jitter lognormal:0.1": "rounds: follow from a run alone",
    "simulate acco -n 1 --replicas 2 -m 0": "m: m=0 must be at least 1",
    "rounds acco --replicas 2 --model w.toml --cluster box.toml": "rounds: a communication takes as long as",
    "simulate dpu -n 1 --replicas 2 --warm-up 3 --steps 3": "warm-up: warm_up=3 leaves none of 3 updates",
    "simulate acco -n 1 --replicas 2 --warm-up 1": "warm-up: acco does not take",
    "simulate acco --replicas 2 --model gpt2 --cluster met.toml --rendezvous torch": "rendezvous: acco does not take",
    "simulate acco -n 1 --replicas 2 --clip": "clip: acco does not take this option",
    f"{OPTIMIZER} adam --update-time clipped": "update-time: the norm is a sum over all shares",
    "simulate wp -n 1 --replicas 2 --rule cdp-v1": "rule: wp does not take this option",
    "simulate pipedream-2bw -n 2 --replicas 2 --rule wp": "rule: 'wp' makes more versions than one a step",
    **{f"{OPTIMIZER} {name}": f"optimizer: {name} needs" for name in ("adafactor", "sm3", "lamb", "lars")},
}


@every_row(("line", "fragment"), REFUSED.items())
def test_what_cannot_be_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, fragment: str
) -> None:
    """In one line that says what to do."""
    monkeypatch.chdir(tmp_path)
    Path("w.toml").write_text(NEVER)
    Path("met.toml").write_text('name = "met"\n[[devices]]\noverlap = "none"\n')
    Path("box.toml").write_text('name = "box"\n[link]\nbandwidth = "1 B/s"\n')
    assert_refused(command(*line.split()), fragment)


@pytest.mark.parametrize("jitter", ["", "lognormal:0.2"])
def test_counts_that_are_not_those_of_their_times_are_refused(jitter: str) -> None:
    """The first one that differs is named."""
    model = Model(stages=(Stage(forward=1, backward=2),))
    options: dict[str, Any] = {"model": model, "replicas": 2, "slow": {1: 3}, "steps": 2}
    options |= {"jitter": jitter} if jitter else {}
    counts = [list(row) for row in simulate("acco", **options).request.counts or ()]
    assert simulate("acco", **options, counts=counts).request.counts == tuple(map(tuple, counts))
    counts[2][0] += 1
    with pytest.raises(
        RequestError, match=f"say {counts[2][0]} micro-batches for device 0 in round 2, whose times ask for"
    ):
        simulate("acco", **options, counts=counts)


A_STOP = st.builds("{}:{} s:{} s".format, st.integers(0, 1), st.integers(0, 20), st.integers(1, 60))


@given(
    name=st.sampled_from(NAMES),
    shape=st.fixed_dictionaries({"replicas": st.integers(2, 4), "m": st.integers(1, 3), "steps": st.integers(3, 8)}),
    work=st.fixed_dictionaries({"parameters": st.integers(0, 40), "update": st.sampled_from([None, 0.5])}),
    stop=st.lists(A_STOP, max_size=2),
    disorder=st.fixed_dictionaries(
        {"link_jitter": st.sampled_from(["", "lognormal:0.4"]), "slow": st.sampled_from([{}, {1: 2.5}])}
    ),
    warm_up=st.integers(0, 2),
)
@settings(max_examples=100, deadline=None)
def test_the_recurrence_finds_counts_where_each_task_has_a_time_of_its_own(
    name: str,
    shape: dict[str, int],
    work: dict[str, Any],
    stop: list[str],
    disorder: dict[str, Any],
    warm_up: int,
) -> None:
    """By chance, and where devices stand still: one run confirms them, and its rounds are as they must be."""
    options: dict[str, Any] = shape | {"jitter": "exponential:0.6", "stop": stop}
    options |= {each: value for each, value in disorder.items() if value}
    options |= {"warm_up": warm_up} if warm_up and name == "dpu" else {}
    model = Model(stages=(Stage(forward=1, backward=2, **work), Stage(forward=1, backward=1, parameters=10)))
    with mock.patch("cdpsim.runs.assembling.counts_by_times", wraps=counts_by_times) as confirmed:
        run = simulate(name, model=model, cluster=Cluster(link=Link(bandwidth=5.0)), **options)
    assert confirmed.call_count == 1
    assert not violations(run)


def test_runs_of_many_rounds_by_chance_need_no_repetition() -> None:
    with mock.patch("cdpsim.runs.assembling.counts_by_times", wraps=counts_by_times) as confirmed:
        run = simulate("acco", 1, model="gpt2", replicas=4, jitter="lognormal:0.3", cluster="a100-nodes", steps=300)
    assert confirmed.call_count == 1
    assert run.program.steps == 601


@pytest.mark.parametrize("lasts", [113, 116, 117])
def test_a_worker_may_have_made_all_tasks_when_a_communication_ends(lasts: int) -> None:
    """Where messages take no time, that is the moment at which it has handed over itself: it makes a block more."""
    run = simulate("dpu", 1, replicas=2, slow={0: 10}, stop=[f"1:0:{lasts}"], steps=2)
    assert not violations(run)
    model = Model(stages=(Stage(forward=1, backward=2),))
    for seed in range(60, 90):
        assert not violations(simulate("dpu", model=model, replicas=3, jitter="lognormal:1", steps=12, seed=seed))


@pytest.mark.every_case
@pytest.mark.parametrize("how", [{"jitter": "lognormal:1e-9"}, {"stop": ["0:0 s:1e-6 s"]}], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpu", {"warm_up": 10}),
        ("acco", {}),
        ("post-local-sgd", {"warm_up": 6, "local_steps": 3}),
        ("local-sgd", {"local_steps": 2}),
        ("co2", {"local_steps": 2}),
    ],
)
def test_metrics_by_chance_are_those_of_steps_behind_a_warm_up(
    name: str, options: dict[str, Any], how: dict[str, Any]
) -> None:
    """With hardly any chance: those of the run without it."""
    asked: dict[str, Any] = options | {"model": "gpt2", "cluster": "pcie-box", "replicas": 4}
    fixed, drawn = (simulate(name, **asked, **given).steady_state for given in ({}, how))
    assert float(drawn.period) == pytest.approx(float(fixed.period), rel=1e-3)
    assert drawn.bubble == pytest.approx(fixed.bubble, abs=1e-3)
    assert drawn.updates / len(drawn.steps) == fixed.updates / len(fixed.steps)


def test_a_stop_that_no_worker_can_wait_for_is_refused() -> None:
    """Others would compute all the while: 10^9 s of it are too many."""
    options: dict[str, Any] = {"model": Model(stages=(Stage(forward=1, backward=2),)), "replicas": 2}
    with pytest.raises(RequestError, match=r"rounds: a round takes as long as 3.33e\+08 blocks.* shorter stops"):
        simulate("acco", **options, stop=["1:4 s:1000000000 s"])
    with pytest.raises(Stalled, match="does not end: device 1 stopped"):
        simulate("acco", **options, stop=["1:4 s"])


@pytest.mark.parametrize("name", ["dpu", "post-local-sgd"])
def test_a_run_goes_on_after_its_warm_up(name: str) -> None:
    """By two updates, where no number is given."""
    assert [simulate(name, 1, replicas=2, warm_up=steps).request.steps for steps in (1, 2, 5)] == [3, 4, 7]


SEVERAL_MESSAGES = {
    "expand": {"expand_collectives": True},
    "fair": {"contention": "fair"},
    "queue": {"contention": "queue"},
}


@pytest.mark.every_case
@pytest.mark.parametrize("how", SEVERAL_MESSAGES.values(), ids=SEVERAL_MESSAGES)
@pytest.mark.parametrize("name", NAMES)
def test_communications_in_several_messages_are_through_as_in_one(name: str, how: dict[str, Any]) -> None:
    """Reduce-scatter, update of a half, gather: 2 + 0.5 + 2 s beside micro-batches of 3 s; wp has two updates."""
    model = Model(stages=(Stage(forward=1, backward=2, update=1, parameters=4_000_000),))
    options: dict[str, Any] = {"model": model, "cluster": Cluster(link=Link(bandwidth=1e6)), "collective": "ring"}
    whole, parts = (simulate(name, replicas=2, **options, **given) for given in ({}, how))
    assert not violations(parts)
    for column in ("micro_batches", "posted", "begun", "ended"):
        assert np.array_equal(getattr(whole.rounds, column), getattr(parts.rounds, column)), column
    assert whole.rounds is not None and whole.rounds.ended[0] == 3 + (5 if name == "wp" else 4.5)
    for figure in ("period", "bubble", "staleness"):
        assert getattr(parts.steady_state, figure) == pytest.approx(getattr(whole.steady_state, figure)), figure
    assert whole.steady_state.certified


def test_links_that_are_shared_make_no_worker_wait() -> None:
    """Whose speeds differ, so that what reaches one is through before what reaches another."""
    model = Model(stages=(Stage(forward=1, backward=2, update=0.5, parameters=4_000_000),) * 2)
    cluster = Cluster(devices=(Devices(count=4),), link=Link(latency=1e-3, bandwidth=4e6))
    run = simulate("dpu", model=model, cluster=cluster, replicas=4, slow={1: 1.7, 2: 1.2}, steps=8, contention="fair")
    assert not violations(run)


def replace_overlap(cluster: Cluster, overlap: str) -> Cluster:
    """The same links between devices that overlap messages and tasks in another way."""
    return Cluster(devices=(Devices(overlap=overlap),), link=cluster.link)


@pytest.mark.parametrize("how", [{"contention": "fair"}, {"jitter": "lognormal:0.3"}], ids=str)
@pytest.mark.parametrize(("name", "stale"), [("dpu", 1), ("wp", 0), ("acco", 0)])
def test_staleness_is_that_of_later_updates(name: str, stale: int, how: dict[str, Any]) -> None:
    """However few there are."""
    model = Model(stages=(Stage(forward=1, backward=2, parameters=4_000_000),))
    cluster = Cluster(link=Link(bandwidth=4e6))
    for steps, overlap in product((1, 2, 3, 4), ("full", "none")):
        beside = replace_overlap(cluster, overlap)
        run = simulate(name, model=model, cluster=beside, replicas=2, steps=steps, **how)
        assert run.summary()["mean_staleness"] == stale


@pytest.mark.parametrize("overlap", ["full", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_without_room_for_others_has_metrics_of_its_own(name: str, overlap: str) -> None:
    """As few updates as were asked for are simulated where more do not fit."""
    cluster = replace_overlap(Cluster(link=Link(bandwidth=4e6)), overlap)
    model = Model(stages=(Stage(forward=1, backward=2, parameters=4_000_000),))
    run = simulate(name, model=model, cluster=cluster, replicas=2, steps=1, jitter="lognormal:0.1", max_memory="60 kB")
    with pytest.raises(RequestError, match="is what --max-memory allows"):
        run.of_steps(3)
    assert run.summary()["period"] > 0 and run.summary()["mean_staleness"] >= 0


def test_shared_links_have_a_period_of_their_own_whatever_number_of_steps_there_is() -> None:
    model = Model(stages=(Stage(forward=1, backward=2, parameters=4_000_000),))
    options: dict[str, Any] = {"model": model, "cluster": Cluster(link=Link(bandwidth=1e6)), "replicas": 3}
    options |= {"slow": {1: 1.7, 2: 1.2}, "contention": "fair"}
    assert len({simulate("wp", steps=steps, **options).steady_state.period for steps in (1, 3, 8)}) == 1


def test_the_last_gathers_of_weight_prediction_are_no_part_of_a_period() -> None:
    """Devices that compute or communicate make two of them at the end, and one in each round before."""
    model = Model(stages=(Stage(forward=1, backward=2, update=0.5, parameters=4_000_000),))
    cluster = Cluster(devices=(Devices(overlap="none"),), link=Link(bandwidth=4e6))
    options: dict[str, Any] = {"model": model, "cluster": cluster, "replicas": 4}
    for steps in (1, 2, 3, 6):
        measured = simulate("wp", **options, jitter="lognormal:1e-9", steps=steps).steady_state
        assert not measured.certified
        assert measured.period == pytest.approx(float(simulate("wp", **options).steady_state.period), rel=1e-6)


def batched_pairs(words: list[str]) -> list[tuple[str, str]]:
    """Options and their values."""
    return [*zip(words[::2], words[1::2], strict=True)]


@pytest.mark.parametrize(
    ("line", "fragment"),
    {
        "acco -n 2 --replicas 2 --steps 17": "n=2, m=1, replicas=2 with steps=17 is 140 tasks",
        "diloco -n 2 --replicas 2 --local-steps 8 --steps 4": "n=2, m=1, replicas=2 with steps=4 is 256 tasks",
        "acco -n 1 --replicas 2 -m 1000": "n=1, m=1000, replicas=2 with steps=3 is 28,000 tasks",
    }.items(),
)
def test_what_does_not_fit_is_said_in_the_numbers_that_were_given(command: Command, line: str, fragment: str) -> None:
    """And what is said to fit fits."""
    told = command("simulate", *line.split(), "--max-memory", "100 kB")
    assert told.code == 2 and fragment in told.err
    fitting = re.search(r"(m|steps)=(\d+) would fit", told.err)
    if fitting:
        name = "-m" if fitting[1] == "m" else "--steps"
        shorter = [word for pair in batched_pairs(line.split()[1:]) if pair[0] != name for word in pair]
        asked = [line.split()[0], *shorter, name, fitting[2], "--max-memory", "100 kB", "-q"]
        assert command("simulate", *asked).code == 0


RECORDED = ["acco", "-n", "1", "--replicas", "3", "--slow", "2:3"]


@pytest.fixture
def recorded(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace of four updates in it."""
    monkeypatch.chdir(tmp_path)
    assert command("simulate", *RECORDED, "--steps", "4", "-o", "run").code == 0
    return tmp_path


def test_counts_of_a_file_are_an_earlier_run(recorded: Path, command: Command) -> None:
    """Their number says how many updates there are; an experiment names the file beside it, Python any path."""
    assert command("simulate", *RECORDED, "--counts", "run/rounds.csv", "-o", "again").code == 0
    (recorded / "e.toml").write_text(
        '[run]\nschedule = "acco"\nn = 1\nreplicas = 3\nslow = ["2:3"]\ncounts = "run/rounds.csv"\n'
    )
    assert command("simulate", "e.toml", "-o", "third").code == 0
    for name in ("tasks.csv", "rounds.csv", "summary.json"):
        first, second, third = (Path(folder, name).read_bytes() for folder in ("run", "again", "third"))
        assert first == second == third
    loaded = load_counts(recorded / "run" / "rounds.csv")
    found = rounds("acco", 1, replicas=3, slow={2: 3}, counts=loaded)
    assert found.micro_batches.reshape(-1, 3).tolist() == loaded
    uneven = simulate("gpipe", 2, m=3, replicas=3, counts=recorded / "run" / "rounds.csv")
    assert uneven.program.counts.tolist() == [sum(row) for row in loaded]


def test_a_record_with_other_options_finds_its_counts_anew(recorded: Path, command: Command) -> None:
    """Options that are given win; those of a record that is asked as it is are the same run."""
    record = "run/summary.json"
    assert command("simulate", "--from", record, "--steps", "7", "-o", "longer").code == 0
    assert command("simulate", *RECORDED, "--steps", "7", "-o", "asked").code == 0
    assert Path("longer/rounds.csv").read_bytes() == Path("asked/rounds.csv").read_bytes()
    for options in (["--replicas", "2", "--slow", "1:2"], ["-m", "2"], ["--slow", "1:4"]):
        assert command("simulate", "--from", record, *options, "-q").code == 0
    assert command("simulate", "--from", record, "-o", "same").code == 0
    assert Path("same/summary.json").read_bytes() == Path(record).read_bytes()


def test_rounds_are_written_as_json(command: Command) -> None:
    rows = json.loads(command("rounds", *RECORDED, "--format", "json").out)
    assert [row["length"] for row in rows][-1] is None and rows[0]["length"] == 6


HEADER = "round,device,micro_batches,posted,begun,ended"
NO_COUNTS = {
    "run/rounds.csv --slow 2:2": "counts: say 2 micro-batches for device 0 in round 1, whose times ask for 1",
    "run/rounds.csv -m 2 --slow 2:3": "counts: are no rounds of 4 updates",
    "one.csv": "counts: have shape (1, 1) instead of (3, 3)",
    "run/rounds.csv --steps 3": "counts: have shape (9, 3) instead of (7, 3)",
    "run/tasks.csv": "its header is",
    "run": "run: is a folder",
    "none.csv": "none.csv: no such file",
    "late.csv": "has not each device of each round in a row",
    "twice.csv": "has not each device of each round in a row",
    "far.csv": "has not each device of each round in a row",
    "no.csv": "has not each device of each round in a row",
    "words.csv": "line 2: micro_batches is 'x'",
    "many.csv --slow 2:3": "counts: are no rounds of 1 updates",
}


@pytest.mark.every_case
@pytest.mark.parametrize(("line", "fragment"), NO_COUNTS.items())
def test_counts_of_a_file_may_be_none(recorded: Path, command: Command, line: str, fragment: str) -> None:
    """In one line: those that times do not ask for, and files that are no rounds."""
    rows = {
        "one": "0,0,1,2,2,2\n",
        "late": "1,0,1,2,2,2\n",
        "twice": 2 * "0,0,1,2,2,2\n",
        "far": "0,999999999,1,2,2,2\n",
        "no": "",
    }
    many = "".join(f"{r},{d},{4294967297 if r else 1},2,2,2\n" for r in range(3) for d in range(3))
    for name, text in (rows | {"words": "0,0,x,2,2,2\n", "many": many}).items():
        Path(f"{name}.csv").write_text(f"{HEADER}\n{text}")
    file, *options = line.split()
    assert_refused(command("rounds", *["acco", "-n", "1", "--replicas", "3", "--counts"], file, *options), fragment)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "pipedream-2bw"])
def test_workers_that_are_pipelines_are_refused(name: str) -> None:
    """Their devices would have to agree when a round ends; a rule alone asks for no rounds."""
    order = replace(SCHEDULES[name].order, rounds=OverlappedRounds(2), together=False)
    schedule = replace(SCHEDULES[name], name="mine", order=order, rule=ACCO, state=BESIDE)
    with pytest.raises(RequestError, match="rounds: end when the communication before is through"):
        simulate(schedule, 4, m=4, replicas=2)


def test_pipelines_that_overlap_their_sums_take_the_rule() -> None:
    """Every second version of theirs is an estimate, and none of their gradients is late."""
    run = simulate("pipedream-2bw", 3, m=3, replicas=2, steps=6, rule="acco")
    assert not violations(run)
    assert run.summary()["mean_staleness"] == 0
    made = run.tasks[(run.tasks.kind == "U") & (run.tasks.device == 0)]
    assert made.estimate.tolist() == [1, 0] * 3


@given(
    name=st.sampled_from(NAMES),
    overlap=st.sampled_from(OVERLAPS),
    replicas=st.integers(1, 4),
    m=st.integers(1, 3),
    times=st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 60)),
    slow=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_rounds_are_those_that_a_run_asks_for_however_messages_overlap(
    name: str, overlap: str, replicas: int, m: int, times: tuple[int, int, int], slow: int
) -> None:
    """Where tasks wait for messages, too, which no recurrence says."""
    forward, update, size = times
    work: dict[str, Any] = {"update": float(update)} if update else {}
    stage = Stage(forward=float(forward), backward=2.0 * forward, parameters=size, **work)
    cluster = Cluster(devices=(Devices(overlap=overlap),), link=Link(latency=1.0, bandwidth=7.0))
    more: dict[str, Any] = {"slow": {replicas - 1: slow}} if slow > 1 else {}
    run = simulate(name, 1, m=m, replicas=replicas, model=Model(stages=(stage,)), cluster=cluster, steps=4, **more)
    assert violations(run) == {}
    run = run.whole
    counts = counts_by_times(run.program, run.end, m, 0)
    assert tuple(map(tuple, counts.tolist())) == run.request.counts
