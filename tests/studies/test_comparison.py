"""Schedules on equal devices, of equal batches: numbers by the papers' formulas, rates and utilizations by hand."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdpsim import SCHEDULES, Cluster, Model, Request, Stage, simulate
from cdpsim.cluster import Devices
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.schedules import Schedule
from cdpsim.studies.comparison import compare
from tests.conftest import Command
from tests.helpers.command_line import refuse
from tests.helpers.every_row import every_row
from tests.helpers.profiles import A100, profiled

SPEED = Cluster(devices=(Devices(speed=10e12, achieved=0.5, memory=10**9),))
LAYER = Stage(forward=Work(1e12), backward=Work(2e12), weight_backward=Work(1e12), activation=1000)


def layers(count: int, **facts: Any) -> Model:
    """A model of equal layers, of 2 samples a micro-batch of 100 tokens each."""
    return Model(stages=(LAYER,) * count, samples=2, tokens=100, **facts)


def chunks_of(schedule: Schedule) -> int:
    """The stages of a device: two of a V, and of an interleaved schedule for which no number is given."""
    two = ("zbv", "dualpipev", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")
    return 2 if schedule.name in two else 1


PIPELINES = [name for name, schedule in SCHEDULES.items() if schedule.order.lists]
STREAMED = ("pp-cdp", "pipedream", "pipedream-2bw", "pipemare")
FREE_M = {*PIPELINES, "pipedream-2bw", "pipemare"}

LOCAL = {name for name, each in SCHEDULES.items() if each.order.local}


def test_one_pipeline_lies_on_all_devices() -> None:
    """The stages are devices times chunks, and as many micro-batches as the batch has; Table 1's of DP have N of N.

    Cyclic workers share 32 micro-batches where these are a multiple of n: of 8, and not of the pyramid's 3. Its three
    stages have 5, 5 and 6 of 16 layers, and so 3, 3 * 11 / 16 and 3 * 6 / 16 devices, rounded up.
    """
    found = compare(devices=8, batch=64, model=layers(16), cluster=SPEED)
    rows = {row.schedule: (row.n, row.m, row.replicas, row.batch) for row in found.measured}
    expected = {name: (8 * chunks_of(SCHEDULES[name]), 32, 1, 64) for name in FREE_M}
    expected |= dict.fromkeys(("multi-cdp", "zero-cdp", "pp-cdp"), (8, 32, 1, 64))
    expected |= dict.fromkeys(("multi-dp", "zero-dp"), (8, 8, 1, 16))
    in_one_place = [name for name, schedule in SCHEDULES.items() if schedule.order.one_place]
    expected |= dict.fromkeys(in_one_place, (16, 4, 8, 64))  # a data rank on each device, of all layers
    expected |= dict.fromkeys(LOCAL, (16, 4, 8, 8 * 64)) | {"acco": (16, 4, 8, 2 * 64)}  # local steps, and rounds
    assert rows == expected | {"pipedream": (8, 1, 1, 2), "mp-cdp": (3, 3, 1, 6)}
    assert {row.devices for row in found.measured} == {8}
    assert found.left_out == {"devices": ["single-dp", "single-cdp", "mp-dp"]}
    marked = {row.schedule for row in found.measured if found.mark(row) == "*"}
    assert marked == {"multi-dp", "mp-cdp", "zero-dp", "acco", *LOCAL}
    assert [row.schedule for row in found.measured if found.mark(row) == "+"] == ["pipedream"]


def test_several_pipelines_share_devices_and_batch() -> None:
    """With four stages, eight devices are two pipelines, or four of those with two stages on a device."""
    found = compare(n=4, devices=8, batch=64, model=layers(8), cluster=SPEED)
    rows = {row.schedule: (row.n, row.m, row.replicas, row.batch) for row in found.measured}
    assert rows["1f1b"] == rows["pipedream-2bw"] == rows["pp-cdp"] == (4, 16, 2, 64)
    assert rows["zbv"] == rows["dualpipev"] == rows["looped-bfs"] == (4, 8, 4, 64)
    assert rows["pipedream"] == (4, 1, 2, 4)
    assert rows["dp"] == (4, 4, 8, 64)
    assert (rows["multi-dp"], rows["mp-dp"]) == ((4, 8, 1, 16), (4, 2, 1, 4))
    assert {row.devices for row in found.measured} == {8}
    assert found.left_out == {"devices": ["single-dp", "single-cdp", "multi-cdp", "mp-cdp", "zero-dp", "zero-cdp"]}


def test_devices_are_those_of_the_cluster_where_nothing_says_how_many() -> None:
    """A batch of 64 samples on eight devices is 32 micro-batches of a pipeline, and 4 of each of eight data ranks."""
    asked: dict[str, Any] = {"batch": 64, "model": layers(8), "sort": "given"}
    eight = Cluster(devices=(Devices(count=8, speed=10e12, memory=10**9),))
    for cluster in (eight, [eight, eight]):
        found = compare("1f1b", "dp", cluster=cluster, **asked)
        assert found.devices == 8
        assert {(row.schedule, row.devices, row.m, row.replicas) for row in found.measured} == {
            ("1f1b", 8, 32, 1),
            ("dp", 8, 4, 8),
        }
    for said, count in (
        ({"n": 4}, 4),
        ({"replicas": 1, "n": 2}, 2),
        ({"cluster": SPEED}, 8),
        ({"shard": 2, "n": 2}, 4),
    ):
        (row,) = compare("1f1b", **{"cluster": eight, **asked, **said}).measured
        assert row.devices == count
    (row,) = compare(Request("1f1b", 4, model=layers(8), cluster=eight), batch=64).measured
    assert row.devices == 4
    assert [compare("dp", cluster=[eight, SPEED], **asked).devices] == [None]


def test_a_run_of_an_order_of_its_own_is_compared() -> None:
    """One micro-batch after another takes 4 slots each on two stages; 1F1B takes 2 (m + n - 1) = 6 for both."""
    rows = [["F0", "B0", "F1", "B1"]] * 2
    run = simulate("in-turn", order=rows)
    assert [(row.schedule, row.step) for row in compare("1f1b", run, n=2)] == [("1f1b", 6), ("in-turn", 8)]
    assert [row.step for row in compare(run.request)] == [8]


def test_one_sample_is_no_samples() -> None:
    one = Model(stages=(LAYER,), samples=1)
    table = str(compare("dp", devices=1, batch=1, model=one, cluster=SPEED))
    assert table.startswith("1 device, 1 sample in a training step\n")
    assert ", 1 sample a micro-batch, " in table
    assert compare("1f1b", devices=1, batch=1).heads[0] == "1 device, 1 micro-batch in a training step"
    with pytest.raises(RequestError, match="batch: 1 sample is not divided by micro-batches of 2 samples"):
        compare("1f1b", devices=1, batch=1, model=layers(1), cluster=SPEED)


def test_a_named_schedule_that_cannot_run_is_left_out(command: Command, here: Path) -> None:
    """mp-dp has N times N devices, and 8 is no square. Where none is left, the first refusal is that of the table."""
    done = command("compare", "1f1b", "mp-dp", "gpipe", "--devices", 8, "--format", "json")
    assert [row["schedule"] for row in json.loads(done.out)] == ["1f1b", "gpipe"]
    assert done.err == "cdpsim: left out because of devices: mp-dp (by its name each says why)\n"
    assert compare("1f1b", "mp-dp", devices=8).left_out == {"devices": ["mp-dp"]}
    assert command("compare", "mp-dp", "1f1b", "--devices", 8, "-o", "it.svg").code == 0
    assert command("compare", "mp-dp", "1f1b", "--devices", 8, "-o", "it.svg", "--force").code == 0
    refuse(command, here, "compare mp-dp single-dp --devices 8", "devices: mp-dp runs on 4 with n=2, m=2 and on 9")
    refuse(command, here, "compare 1f1b mp-pd --devices 8", "unknown schedule 'mp-pd'; did you mean 'mp-dp'?")


def test_data_ranks_that_share_states_are_devices_too() -> None:
    """With --shard S a data rank has a device of every S; with --zero alone all of them share."""
    asked: dict[str, Any] = {"devices": 8, "batch": 64, "model": layers(8), "cluster": SPEED}
    cases: list[tuple[dict[str, Any], int]] = [({"shard": 4}, 2), ({"zero": 2}, 8), ({"shard": 2, "zero": 0}, 4)]
    for options, stages in cases:
        found = compare(["dp", "1f1b"], **asked, **options)
        rows = {row.schedule: (row.n, row.m, row.replicas, row.devices, row.batch) for row in found.measured}
        ranks = 8 // stages
        assert rows["dp"] == (8, 4, 8, 8, 64)
        assert rows["1f1b"] == (8 if "zero" not in options else stages, 32 // ranks, ranks, 8, 64)
    with pytest.raises(RequestError, match="devices: 8 are no multiple of shard=3; give a multiple"):
        compare(["dp"], **asked, shard=3)


def test_the_longest_stage_of_layers_is_one_of_the_pipeline() -> None:
    """Five equal layers in two stages, of two and three: 3 / 2.5 - 1."""
    whole, by_layer = (
        compare("1f1b", n=2, shard=2, by_layer=each, model=layers(5, precision="fp32"), cluster=SPEED).measured[0]
        for each in (False, True)
    )
    assert whole.imbalance == by_layer.imbalance == pytest.approx(0.2)
    assert whole.longest_stage == by_layer.longest_stage


def test_rows_by_names_of_dp_have_these_names() -> None:
    rows = compare(["ddp", "zero-1", "zero-2", "fsdp"], n=4, replicas=4, model=layers(4), cluster=SPEED).measured
    assert [row.schedule for row in rows] == ["ddp", "zero-1", "zero-2", "fsdp"]
    lists = compare("dp", n=4, shard=4, zero=[0, 1, 2, 3], model=layers(4), cluster=SPEED).measured
    assert [row.asked for row in lists] == [{"zero": str(zero)} for zero in range(4)]
    assert [replace(row, schedule="dp") for row in rows] == [replace(row, asked={}) for row in lists]


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5])
def test_model_parallelism_has_squares_and_triangles_of_devices(side: int) -> None:
    """The paper's Table 1: N^2 devices, and N(N+1)/2."""
    for name, devices in (("mp-dp", side**2), ("mp-cdp", side * (side + 1) // 2)):
        (row,) = compare([name], devices=devices).measured
        assert (row.n, row.m, row.devices) == (side, side, devices)


def test_more_devices_than_layers() -> None:
    """Each device of data parallelism has all layers, whatever their number."""
    (row,) = compare(["multi-dp"], devices=12, model=layers(4), cluster=SPEED).measured
    assert (row.n, row.m, row.devices) == (4, 12, 12)


def test_rates_are_those_of_a_pipeline_with_flushes() -> None:
    """1F1B of p equal stages takes m + p - 1 passes for m micro-batches: five of 0.6 s, at half of 10 TFLOP/s.

    In these 3 s two devices could compute 60 TFLOP, and compute 4 micro-batches of 2 stages of 3 TFLOP.
    """
    (row,) = compare(["1f1b"], devices=2, batch=8, model=layers(2), cluster=SPEED).measured
    assert [row.step, row.bubble] == pytest.approx([3.0, 1 / 5])
    assert [row.sample_rate, row.sample_time] == pytest.approx([8 / 3, 3 / 8])
    assert [row.token_rate, row.per_device] == pytest.approx([800 / 3, 400 / 3])
    assert [row.mfu, row.hfu] == pytest.approx([0.4, 0.4])


def test_recomputation_is_no_use_of_a_model() -> None:
    """Each backward computes its forward again: five passes of 0.8 s. The model's own FLOP are then 24 of 80 TFLOP."""
    (row,) = compare(["1f1b"], devices=2, batch=8, model=layers(2), cluster=SPEED, recompute="full").measured
    assert row.step == pytest.approx(4.0)
    assert [row.mfu, row.hfu] == pytest.approx([0.3, 0.4])
    (again,) = compare([Request("1f1b", 2, m=4, model=layers(2), cluster=SPEED, recompute="full")]).measured
    recorded = Request("1f1b", 2, m=4, model=layers(2), cluster=SPEED, recompute="full").to_builtins()
    (third,) = compare([recorded]).measured
    assert (row.mfu, row.hfu) == (again.mfu, again.hfu) == (third.mfu, third.hfu)


def test_seconds_have_no_utilization() -> None:
    model = Model(stages=(Stage(forward=1.0, backward=2.0),) * 2)
    (row,) = compare(["1f1b"], devices=2, model=model, cluster=SPEED).measured
    assert (row.mfu, row.hfu, row.token_rate, row.sample_rate) == (None, None, None, None)
    assert row.per_device == row.micro_batch_rate / 2


def test_utilization_of_a_published_model() -> None:
    """Chowdhery et al. 2022 (PaLM), appendix B: 6 FLOP a parameter and token, and 12 L h s for attention.

    Fused attention computes its first product again, which is no FLOP of the model: 14 L h s are computed. The
    embedding multiplies nothing. One device is never idle, and its file says that 44 % of the peak are reached.
    """
    (row,) = compare(["1f1b"], devices=1, batch=8, model=profiled("llama2-7b"), cluster=A100).measured
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 32_000 * 4096
    assert row.token_rate is not None
    assert row.hfu == pytest.approx(0.44, rel=1e-9)
    for share, products in ((row.mfu, 12), (row.hfu, 14)):
        each_token = 6 * parameters + products * 32 * 4096 * 4096
        assert row.token_rate * each_token / 312e12 == pytest.approx(share, rel=1e-3)


def test_devices_of_two_kinds_have_both_peaks() -> None:
    """The slower one decides: it takes 1.2 s a pass, and with the other it could compute 15 TFLOP/s."""
    kinds = Cluster(devices=(Devices(count=1, speed=10e12), Devices(count=1, speed=2.5e12)))
    (row,) = compare(["gpipe"], devices=2, batch=4, model=layers(2), cluster=kinds).measured
    assert row.mfu == pytest.approx(2 * 2 * 3e12 / (row.step * 12.5e12))


def test_runs_compare_as_their_requests_do() -> None:
    """A run has the options of its request; what is neither is refused in one line."""
    runs = [simulate("1f1b", 4, m=8), simulate("gpipe", 4, m=8)]
    assert compare(runs) == compare(*runs) == compare(["1f1b", "gpipe"], n=4, m=8)
    for odd in (3, None, 2.5):
        with pytest.raises(RequestError, match=r"compare: \S+ is no schedule; give a name, a request, a run"):
            compare([odd], n=4)  # type: ignore[list-item]


def test_a_stage_that_takes_longer_is_named() -> None:
    """Stages of 3, 3 and 6 TFLOP: the last one has half as much again as their mean."""
    model = Model(stages=(LAYER, LAYER, Stage(name="head", forward=Work(2e12), backward=Work(4e12))))
    found = compare(["1f1b", "multi-dp"], devices=3, model=model, cluster=SPEED)
    assert {row.schedule: (row.imbalance, row.longest_stage) for row in found.measured} == {
        "1f1b": (pytest.approx(0.5), 2),
        "multi-dp": (None, None),
    }
    assert found.notes[0] == "imbalance 50.0 %, stage 2 (head)"
    split = compare(["1f1b"], n=[2, 3], model=model, cluster=SPEED)
    assert split.notes[0] == "imbalance 50.0 %, stage 2 (head), of 3 stages"
    assert not any(", of 2 stages" in note for note in split.notes)
    assert not any("imbalance" in note for note in compare(["1f1b"], devices=3, model=layers(3), cluster=SPEED).notes)


def test_rows_are_all_combinations() -> None:
    """Schedules as named, then lists in the order of the options; a schedule that does not take one has a row."""
    found = compare(["1f1b", "interleaved-1f1b"], devices=2, m=[4, 8], chunks=[1, 2], sort="given")
    assert found.lists == ("m", "chunks")
    assert [(row.schedule, row.asked) for row in found.measured] == [
        ("1f1b", {"m": "4", "chunks": "1"}),
        ("1f1b", {"m": "8", "chunks": "1"}),
        *(("interleaved-1f1b", {"m": m, "chunks": chunks}) for m in "48" for chunks in "12"),
    ]
    assert [row.m for row in found.measured] == [4, 8, 4, 4, 8, 8]
    assert found.untaken == {"chunks": ["1f1b"]}


def test_an_option_of_several_ranks_changes_nothing_where_there_is_one() -> None:
    """A sum after each micro-batch, or at the end, is the same on one data rank."""
    found = compare("dp", replicas=[1, 2], reduce=["each", "end"], m=2, model=layers(3), cluster=SPEED, sort="given")
    one, same, *others = found.measured
    assert [row.asked for row in (one, same)] == [{"replicas": "1", "reduce": how} for how in ("each", "end")]
    assert [row.asked for row in others] == [{"replicas": "2", "reduce": how} for how in ("each", "end")]
    assert replace(one, asked=same.asked) == same
    assert found.untaken == {}


def test_marks_of_slots_say_where_rates_do_not_compare() -> None:
    """A V has two stages on each device, and each takes as many slots as one of a plain pipeline."""
    found = compare("1f1b", "zb-h1", "zbv", "pipedream", devices=4, batch=16, sort="throughput")
    assert found.heads[0] == "4 devices, 16 micro-batches in a training step"
    assert found.heads[1].startswith("a backward takes two slots")
    assert (
        "micro-batches have 4 stages, but 8 in zbv; all take equal slots: compare bubbles, not rates or memory"
        in found.notes
    )
    work = [row.micro_batch_rate * row.n for row in found.measured]
    assert work == pytest.approx(sorted(work, reverse=True))
    assert "+ a training step is one micro-batch: pipedream" in found.notes


def test_what_cannot_be_equal_is_left_out_of_lists() -> None:
    """The others run; three devices are no multiple of two, and a batch of 12 not of three pipelines of 8 samples."""
    found = compare(["1f1b"], n=[1, 2, 3], devices=3, batch=12, model=layers(3), cluster=SPEED)
    assert [(row.n, row.m, row.replicas) for row in found.measured] == [(1, 2, 3), (3, 6, 1)]
    assert found.left_out == {"devices": ["1f1b (n=2)"]}
    with pytest.raises(RequestError, match="3 are no multiple of the 2"):
        compare(["1f1b"], n=[2, 2], devices=3, batch=12, model=layers(3), cluster=SPEED)


REFUSED: dict[str, dict[str, Any]] = {
    "mp-dp runs on 4 with n=2, m=2 and on 9 with n=3, m=3, and not on 8": {"schedules": ["mp-dp"], "devices": 8},
    "8 are no multiple of the 3 of a pipeline of 1f1b with n=3": {"schedules": ["1f1b"], "n": 3, "devices": 8},
    "9 samples are not divided by micro-batches of 2 samples": {"schedules": ["1f1b"], "devices": 2, "batch": 9},
    "10 samples are not divided by 2 data ranks of micro-batches of 2 samples": {"n": 2, "devices": 4, "batch": 10},
    "m: follows from --batch": {"m": 4, "batch": 8},
    "replicas: follows from --devices": {"replicas": 2, "devices": 8},
    "multi-dp has m=8 on 8 devices": {"schedules": ["multi-dp"], "m": 3, "devices": 8},
    "m: is an empty list": {"m": [], "devices": 8},
    "devices=0 must be at least 1": {"devices": 0},
    "batch=many must be a whole number": {"batch": "many"},
}


@every_row("problem", REFUSED)
def test_what_is_not_equal_is_refused(problem: str) -> None:
    asked: dict[str, Any] = {"schedules": ["gpipe"], "model": layers(8), "cluster": SPEED} | REFUSED[problem]
    with pytest.raises(RequestError, match=problem.replace("(", r"\(")):
        compare(asked.pop("schedules"), **asked)


@every_row(
    ("option", "value", "problem"),
    [
        ("rule", "missing.csv", "missing.csv: no such file"),
        ("counts", "missing.csv", "missing.csv: no such file"),
        ("buckets", "1 MiB,foo", "buckets: .* is neither one of none, torch, megatron, deepspeed nor sizes"),
        ("outer", "foo", "outer: 'foo' is no optimizer"),
        ("stage_replicas", "foo", "stage-replicas: stage-replicas=foo must be a whole number"),
        ("zero", 9, "zero: zero=9, and ZeRO's stages are 0 to 3"),
        ("reduce", "never", "reduce: unknown reduce 'never'"),
        ("warm_up", "foo", "warm-up: warm-up=foo must be a whole number"),
        ("n", "foo", "n: n=foo must be a whole number"),
    ],
)
def test_a_value_that_no_option_has_is_refused_though_some_schedules_do_not_take_it(
    option: str, value: object, problem: str
) -> None:
    """Those would run without it, and the table would say nothing of what was asked."""
    asked: dict[str, Any] = {"n": 3, option: value}
    with pytest.raises(RequestError, match=f"^{problem}"):
        compare(**asked)


COMMAND = "compare --devices 8 --batch 256 --model llama2-7b --cluster a100-nodes"


@pytest.mark.slow
def test_the_table_fits_a_line_and_says_what_differs(command: Command) -> None:
    """Throughput falls from row to row; the rows that train otherwise are marked."""
    done = command(*COMMAND.split())
    head, table, notes = done.out.split("\n\n")
    assert head == "8 devices, 256 samples in a training step"
    assert max(map(len, table.splitlines())) <= 100
    names = ("schedule", "devices", "tokens", "/device", "MFU", "bubble", "exposed", "memory", "fits", "stale")
    assert tuple(table.splitlines()[0].split()) == names
    first = [line.split()[0] for line in table.splitlines()[2:]]
    assert {"pipedream+", "multi-dp*", "zero-dp*", "pp-cdp", "1f1b"} < set(first)
    found = json.loads(command(*COMMAND.split(), "--format", "json").out)
    rates = [row["tokens"] for row in found]
    assert rates == pytest.approx(sorted(rates, reverse=True), rel=1e-12)
    assert [row["schedule"] for row in found] == [name.rstrip("*+") for name in first]
    assert "\n* at its own batch, in samples: " in f"\n{notes}" and ", multi-dp 16, " in notes
    assert "+ a training step is one micro-batch: pipedream\n" in notes
    assert "left out because of devices: single-dp, single-cdp, mp-dp, mp-cdp" in done.err
    every = command(*COMMAND.split(), "--format", "csv").out
    assert [row["tokens"] for row in csv.DictReader(io.StringIO(every))] == [repr(rate) for rate in rates]
    assert {"HFU", "batch", "n", "m"} <= set(command(*COMMAND.split(), "--columns", "all").out.split())


def test_a_long_name_is_shown_whole_and_takes_the_room_of_metrics(command: Command, here: Path) -> None:
    """Columns go by their ranks, and a line says which; with --columns none goes, and programs read all."""
    name = f"{'x' * 60}.csv"
    assert command("timeline", "1f1b", "-n", 4, "-o", name).code == 0
    asked = ("compare", name, "gpipe", "-n", 4, "-m", 4)
    table, note = command(*asked).out.split("\n\n")
    assert table.splitlines()[0].split() == ["schedule", "devices", "micro-batches", "memory", "fits"]
    assert name in table
    assert (
        note
        == "not shown in a line of 100 characters: exposed, staleness, per device, bubble (CSV and JSON have all)\n"
    )
    every = command(*asked, "--columns", "bubble,exposed,staleness,per-device,memory,sent").out
    assert every.split()[:8] == ["schedule", "rule", "bubble", "exposed", "staleness", "per", "device", "memory"]
    assert "not shown" not in every
    assert {"bubble", "exposed", "per_device"} < json.loads(command(*asked, "--format", "json").out)[0].keys()


def test_an_order_that_an_experiment_writes_out_is_compared(command: Command, here: Path) -> None:
    """1F1B of two stages by its actions has 1F1B's metrics, under its own name."""
    actions = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    (here / "mine.toml").write_text(f'schedule = "mine"\norder = {actions}\n')
    asked = ("mine.toml", "1f1b", "-n", 2, "-m", 2, "--sort", "given", "--format", "json")
    own, known = json.loads(command("compare", *asked).out)
    assert own == known | {"schedule": "mine"}


def test_each_heading_of_a_table_stands_once(command: Command) -> None:
    """A listed number is the figure with which a row ran; the bytes of optimizer states are no name of an optimizer."""
    for listed in ("-n 4 -m 4,8 --chunks 1,2 --replicas 1,2", "-n 4 --rule cdp-v1,cdp-v2"):
        asked = ("compare", "pp-cdp", "interleaved-1f1b", *listed.split())
        for heads in (
            command(*asked, "--format", "csv").out.splitlines()[0].split(","),
            command(*asked, "--columns", "all").out.splitlines()[0].split(),
        ):
            assert len(heads) == len({*heads}) and {"n", "m", "chunks", "replicas", "rule"} <= {*heads}
    options: dict[str, Any] = {"model": "gpt2", "cluster": "h100-node", "replicas": 2, "optimizer": ["sgd", "adam"]}
    found = compare("dp", **options, sort="given")
    table = csv.DictReader(io.StringIO(found.printed("csv")))
    rows = [(row["asked optimizer"], int(row["optimizer"])) for row in table]
    assert [name for name, _ in rows] == ["sgd", "adam"]
    assert rows[1][1] == 3 * rows[0][1]  # 4 bytes of master weights beside mixed precision, and 8 of two moments
    pytest.importorskip("pandas")
    assert list(found.frame()["asked optimizer"]) == ["sgd", "adam"]


def test_lists_have_commas(command: Command, here: Path) -> None:
    """One behaviour of a runtime after another is no list, and a file's name is one value."""
    asked = "compare 1f1b -n 2 -m 4,8 --cluster box.toml --model toy.toml --recompute none,full --sort given"
    table = command(*asked.split(), "--format", "csv").out
    rows = [(row["m"], row["recompute"]) for row in csv.DictReader(io.StringIO(table))]
    assert rows == [("4", "none"), ("4", "full"), ("8", "none"), ("8", "full")]
    runtimes = "paper,torch:sends=until-sent,returned_outputs=no,torch"
    found = json.loads(command("compare", "1f1b", *COMMAND.split()[1:], "--runtime", runtimes, "--format", "json").out)
    assert {row["asked"]["runtime"] for row in found} == {
        *("paper", "torch:sends=until-sent,returned_outputs=no", "torch")
    }
    (here / "a,b.toml").write_text((here / "toy.toml").read_text())
    assert command("compare", "1f1b", "--model", "a,b.toml", "--cluster", "box.toml").code == 0
    for option, known, unknown, near in (
        ("model", "gpt2", "gtp2", "gpt2"),
        ("cluster", "a100-nodes", "a10-nodes", "a100-nodes"),
        ("optimizer", "adam", "admw", "adamw"),
        ("rule", "dp", "cpd-v2", "cdp-v2"),
    ):
        others = {"model": "gpt2", "cluster": "a100-nodes"} | {option: f"{known},{unknown}"}
        words = " ".join(f"--{name} {value}" for name, value in others.items())
        refuse(
            command,
            here,
            f"compare 1f1b -n 2 {words}",
            f"{option}: unknown {option} '{unknown}'; did you mean '{near}'",
        )
    refuse(command, here, "compare 1f1b -n 2,", "-n: has nothing between two commas")
    refuse(command, here, "compare 1f1b -n 2,x", "n=x must be a whole number")


def test_steps_without_a_number_go_on_after_a_warm_up() -> None:
    """As those of a single request do."""
    (row,) = compare("dpu", replicas=2, n=1, warm_up=10).measured
    assert row.step == simulate("dpu", 1, replicas=2, warm_up=10).steady_state.period
