"""A replay ends where torch's own parallel training does, and torch holds and sends what is committed."""

import csv
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.validation.cases import OPTIMIZERS
from tests.validation.measured_tables import PAGE, peers_summary
from validation.__main__ import main
from validation.peers import measure
from validation.peers.comparison import Comparer, Workload, left_over, simulate_anew
from validation.peers.measure import let_threads_rest, measure_memory, observe, train
from validation.peers.requests import peers_table
from validation.peers.runtimes import PEERS, Ended, own_stages, tensors_of_owner
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, Outcome
from validation.report.schema import PeerReport, read_peers

MODELS = ("mlp", "transformer")
PIPELINES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble")
FOLDER = Path(__file__).parents[2] / "validation" / "results"
RESULTS, DATA_RANKS = FOLDER / "peers-cpu-2026-11-23.json", FOLDER / "peers-data-ranks-cpu-2026-11-23.json"
BY_DATA_RANKS = [name for name, peer in PEERS.items() if peer.schedule == "dp"]
SMALL = Workload(2, 4, sizes=(("width", 32), ("length", 8), ("heads", 2)), batch=2)
every_model = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """As many as there are micro-batches and stages, alive over all tests."""
    with Ranks(request.param) as some:
        yield some


def case_of(schedule: str, ranks: Ranks, model: str, optimizer: str, rule: str | None = None) -> Case:
    return Case(schedule, len(ranks.pids), steps=4, rule=rule, model=model, optimizer=OPTIMIZERS[optimizer])


def apart(outcomes: list[Outcome], peers: list[Ended]) -> float:
    """The largest difference between what a replay's devices and torch's ranks ended with."""
    pairs = [
        (outcome.parameters[stage], ended[stage])
        for outcome in outcomes
        for ended in peers
        for stage in outcome.parameters.keys() & ended.keys()
    ]
    return float(np.max([np.abs(mine - theirs).max() for mine, theirs in pairs]))  # nan where one is


@pytest.mark.parametrize(("model", "optimizer"), [("mlp", "momentum"), ("transformer", "adam")])
@pytest.mark.parametrize(("schedule", "peer"), [("multi-dp", "ddp"), ("zero-dp", "fsdp2")])
def test_replicas_end_where_torchs_do(ranks: Ranks, schedule: str, peer: str, model: str, optimizer: str) -> None:
    """multi-dp where DistributedDataParallel does, zero-dp where FSDP2 does."""
    case = case_of(schedule, ranks, model, optimizer)
    assert apart(ranks.run(case), ranks.call(train, peer, case)) <= 1e-12


@pytest.mark.parametrize(("schedule", "model"), [*zip(PIPELINES, MODELS * 2, strict=True)])
def test_a_pipeline_with_a_flush_ends_where_torchs_do(ranks: Ranks, schedule: str, model: str) -> None:
    """With the same stages on the same ranks, also where backwards are split."""
    case = case_of(schedule, ranks, model, "momentum")
    devices = case.n
    if schedule.startswith("interleaved"):
        case = replace(case, n=2 * devices, options={"m": devices, "chunks": 2})
    ended = ranks.call(train, schedule, case)
    assert [list(one) for one in ended] == [[*range(d, case.n, devices)] for d in range(devices)]
    assert apart(ranks.run(case), ended) <= 1e-12


@every_model
def test_the_wrong_rule_does_not_end_there(ranks: Ranks, model: str) -> None:
    """Delayed gradients are another training than DistributedDataParallel's."""
    ended = ranks.call(train, "ddp", case_of("multi-dp", ranks, model, "momentum"))
    delayed = ranks.run(case_of("multi-cdp", ranks, model, "momentum", rule="cdp-v2"))
    assert apart(delayed, ended) > 1e-6


# Memory, messages and parameters of torch's runtimes


on_two_ranks = pytest.mark.parametrize("ranks", [2], indirect=True)


def test_the_stages_of_a_v() -> None:
    """Rank r has stages r and 2P-1-r there, and r and P+r in a loop."""
    v, loop = (PEERS[name] for name in ("zbv", "interleaved-1f1b"))
    workload = Workload(4, 8)
    assert [own_stages(rank, workload.case(v)) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [own_stages(rank, workload.case(loop)) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_thread_that_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of gloo's that has no processor: it still has a reference to what it sent."""
    monkeypatch.setattr(measure, "LONGEST_WAIT", 60.0)  # a slow machine takes more than a second
    begun, work = threading.Event(), bytes(200_000_000)

    def hold() -> None:
        begun.set()
        hashlib.sha256(work)  # without Python's lock

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    let_threads_rest()
    ended = not thread.is_alive()
    thread.join()
    assert ended


@on_two_ranks
def test_the_allocator_has_what_live_storages_take(ranks: Ranks) -> None:
    """Before a step, at its peak and after it, to the byte; 1F1B's static buffers are a boundary per micro-batch."""
    peer = PEERS["1f1b"]
    case = SMALL.case(peer)
    memory, contents = ranks.call(measure_memory, "1f1b", case), ranks.call(observe, "1f1b", case)
    boundary = 4 * 2 * 8 * 32
    for own, there in zip(memory, contents, strict=True):
        assert (own.before, own.peak, own.after) == (there.before, there.peak, there.after)
        assert sum(there.at_peak.values()) == there.peak
    assert contents[0].at_peak["receive buffers of gradients"] == 4 * boundary
    assert contents[1].at_peak["receive buffers of activations"] == 4 * boundary
    assert contents[1].at_peak["outputs"] == 4 * boundary


@on_two_ranks
def test_a_pipelines_messages_in_its_order(ranks: Ranks) -> None:
    """Written out: rank 0 sends two activations before the first gradient comes back; rank 1 a gradient after each."""
    contents = ranks.call(observe, "1f1b", SMALL.case(PEERS["1f1b"]))
    boundary = 4 * 2 * 8 * 32
    sends = [[call for call in own.calls if call.call == "send"] for own in contents]
    assert [(call.label, call.peer, call.nbytes) for call in sends[0]] == [
        (f"activation 0,{i}", 1, boundary) for i in range(4)
    ]
    assert [(call.label, call.peer, call.nbytes) for call in sends[1]] == [
        (f"activation gradient 1,{i}", 0, boundary) for i in range(4)
    ]


@pytest.mark.slow
@on_two_ranks
@pytest.mark.parametrize("name", ["zbv", "ddp", "checkpoint-reentrant"])
def test_a_runtime_is_compared(ranks: Ranks, name: str) -> None:
    """Messages and parameters are the simulation's; memory is counted above the parameters that lie there."""
    report = Comparer(ranks, SMALL, repeats=0).compare(PEERS[name])
    assert report.messages.same, report.messages.first_difference
    assert report.max_abs_difference is not None and report.max_abs_difference <= 1e-12
    width = 32
    block = 4 * (12 * width**2 + 10 * width)  # bytes of a block's parameters
    for device in report.devices:
        assert device.parameters == 2 * block
        assert sum(device.contents.values()) + device.in_no_storage == device.bytes + device.parameters
        assert device.contents["parameters"] == device.parameters


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("width", [96, 64])
def test_fsdp2_has_a_share_of_every_stage(ranks: Ranks, width: int) -> None:
    """Of equal rows for each of three ranks, which those of width 64 are padded to."""
    workload = Workload(3, 3, "mlp", (("width", width),), batch=16)
    report = Comparer(ranks, workload, repeats=0).compare(PEERS["fsdp2"])
    assert report.messages.same, report.messages.first_difference
    numbers = 4 * 3 + 8  # of the device mesh, and of the loss
    assert [left_over(device, {}) for device in report.devices] == [numbers] * 3


@on_two_ranks
def test_fsdp2_has_no_parameters_beside_the_loss(ranks: Ranks) -> None:
    """A head's are freed before it is made, and come again behind the backward of it, which makes the peak."""
    workload = Workload(2, 2, "tests.validation.networks:with_head", (), batch=8)
    report = Comparer(ranks, workload, repeats=0).compare(PEERS["fsdp2"])
    for device in report.devices:
        assert "gathered parameters" not in device.contents
        assert 0 <= left_over(device, {}) <= 4 * 2 + 8  # of the device mesh, and of the loss


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_an_owner_of_whole_tensors_has_their_states(ranks: Ranks) -> None:
    """Six matrices of an MLP in three stages go to three ranks in pairs, and the biases behind them."""
    workload = Workload(3, 3, "mlp", (("width", 32),), batch=128)
    report = Comparer(ranks, workload, repeats=0).compare(PEERS["zero-redundancy"])
    assert report.messages.same, report.messages.first_difference
    matrices = 2 * 4 * 32 * 64
    biases = [4 * (64 + 32)] * 3
    for device, own in zip(report.devices, biases, strict=True):
        assert device.contents["optimizer"] == 2 * (matrices + own) + 4 * 4  # two moments, and four counters
        assert 0 <= left_over(device, {}) <= 64


# Models unlike the harness' own


OTHERS = ("llama", "tied_llama", "norms", "convolutions")
IN_STAGES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev")
IN_COPIES = ("ddp", "fsdp2", "zero-redundancy")
# Not within 1 %: bytes of torch's peak beyond the simulation's, workspaces included, for batches of two.
APART = {
    ("tied_llama", "fsdp2"): 115_664,  # torch gathers the tied tensor for both of its stages
    ("norms", "zbv"): -12_320,  # autograd adds two gradients in place, which it does not in a mode of dispatch
    ("convolutions", "fsdp2"): -37_168,
}


def within_tolerance(ranks: Ranks, model: str, name: str, dtype: str = "float32") -> None:
    """Assert that each rank holds and sends what is simulated of layers, in stages of unequal size."""
    workload = Workload(2, 4, f"tests.validation.peer_models:{model}", (), 2, dtype=dtype)
    report = Comparer(ranks, workload, repeats=0).compare(PEERS[name])
    assert report.ok, (report.messages.first_difference, report.max_abs_difference, report.devices)
    assert all(set(own.remainder) <= {"workspaces of kernels", "states of whole tensors"} for own in report.devices)


@on_two_ranks
@pytest.mark.parametrize(("model", "name"), [pair for pair in product(OTHERS, IN_STAGES) if pair not in APART])
def test_pipelines_of_other_models(ranks: Ranks, model: str, name: str) -> None:
    """A vocabulary, a tied head, odd widths, convolutions; each takes three runs on two ranks, and so seconds."""
    within_tolerance(ranks, model, name)


@on_two_ranks
@pytest.mark.parametrize(("model", "name"), [pair for pair in product(OTHERS, IN_COPIES) if pair not in APART])
def test_data_ranks_of_other_models(ranks: Ranks, model: str, name: str) -> None:
    """With a stage for each layer; each takes three runs on two ranks, and so seconds."""
    within_tolerance(ranks, model, name)


@on_two_ranks
@pytest.mark.parametrize(("model", "name"), APART)
def test_what_is_apart_is_so_by_these_bytes(ranks: Ranks, model: str, name: str) -> None:
    """Whoever mends one takes it out; each takes three runs on two ranks, and so seconds."""
    workload = Workload(2, 4, f"tests.validation.peer_models:{model}", (), 2)
    report = Comparer(ranks, workload, repeats=0).compare(PEERS[name])
    assert not report.ok
    found = [left_over(device, report.remainder) for device in report.devices]
    assert all(abs(bytes_apart - APART[model, name]) <= 64 for bytes_apart in found), found


# The committed results


def committed() -> list[PeerReport]:
    return read_peers(RESULTS).peers


def by_data_ranks() -> list[PeerReport]:
    return read_peers(DATA_RANKS).peers


def test_torch_as_in_the_notes() -> None:
    """The peaks of four ranks, measured before by another program, to the byte."""
    reports = [*committed(), *(report for report in by_data_ranks() if report.request.model == "transformer")]
    measured = {report.name: [own.bytes for own in report.devices] for report in reports if report.ranks == 4}
    assert measured["1f1b"] == [48835584, 40954880, 32549888, 27814948]
    assert measured["gpipe"] == [78775296, 78775296, 78775296, 79299620]
    assert measured["interleaved-1f1b"] == [123409408, 109220864, 94508032, 80319524]
    assert measured["interleaved-zero-bubble"] == [102912000, 110776320, 116543488, 124407844]
    assert measured["zbv"] == [101863448, 102912000, 113364992, 123867136]
    assert measured["dualpipev"] == [102919188, 107123712, 108172288, 102929408]
    assert measured["ddp"] == [50439176] * 4
    assert measured["fsdp2"] == [47292440] * 4
    assert measured["checkpoint"] == [22073288] * 4
    assert measured["checkpoint-kept"] == [26816264] * 4


def test_all_runtimes_are_committed() -> None:
    """On two and on four ranks; each sent what its simulation sends, and ended where it should."""
    others = [name for name in PEERS if name not in BY_DATA_RANKS]
    assert [(report.ranks, report.name) for report in committed()] == [(n, name) for n in (2, 4) for name in others]
    assert [(report.ranks, report.request.model, report.name) for report in by_data_ranks()] == [
        (n, model, name) for n in (2, 4) for model in ("transformer", "mlp") for name in BY_DATA_RANKS
    ]
    for report in [*committed(), *by_data_ranks()]:
        assert report.ok and report.judged, report.name
        assert report.max_abs_difference is not None and report.max_abs_difference <= 1e-12, report.name
        assert all(own.unseen == 0 for own in report.devices), report.name
        if PEERS[report.name].kind == "pipeline":  # which allocates nothing but tensors
            assert all(own.in_no_storage == 0 for own in report.devices), report.name


def test_a_named_remainder_is_all_that_is_missing() -> None:
    """To 1,024 B: a boundary of 8 x 64 x 256 numbers, and a state of random numbers for each stage."""
    for report in committed():
        again = {"checkpoint-reentrant": 4 * 8 * 64 * 256, "checkpoint-kept": 0}.get(report.name)
        assert sum(report.remainder.values()) == (0 if again is None else again + 5056 * report.ranks)
        if report.remainder:
            assert all(abs(left_over(device, report.remainder)) <= 1024 for device in report.devices)


def test_data_ranks_have_numbers_beyond_their_simulation() -> None:
    """Of the ranks in FSDP2's device mesh, of losses, and of Adam's updates: four bytes each."""
    for report in by_data_ranks():
        if report.request.model == "transformer":
            left = [left_over(device, {}) for device in report.devices]
            assert all(0 <= more <= 4 * report.ranks + 8 for more in left), report.name
            assert report.name != "fsdp2" or left == [4 * report.ranks + 8] * report.ranks


def test_what_mlps_hold_differently_is_below_a_thousandth() -> None:
    """An MLP's parameters outweigh its activations by far, and its peaks are at moments inside of tasks."""
    for report in by_data_ranks():
        assert all(abs(left_over(device, {})) <= 0.002 * device.bytes for device in report.devices), report.name


def test_owners_have_whole_tensors() -> None:
    """A rank's tensors: the largest of those left goes to the rank that has least, as torch deals them out."""
    for report in by_data_ranks():
        if report.name == "zero-redundancy" and report.request.model == "transformer":
            workload = Workload(report.ranks, report.request.m)
            for device in report.devices:
                own = tensors_of_owner(workload.case(PEERS[report.name]), device.device)
                assert device.contents["optimizer"] == 2 * sum(own) + 4 * len(own)


@pytest.mark.slow
def test_the_simulator_still_says_what_it_said() -> None:
    """Every peak, category, task and message, from stages profiled now; `peers --from` makes the file anew."""
    for report in [*committed(), *by_data_ranks()]:
        assert simulate_anew(report) == report, report.name


def test_the_page_of_results_sums_them_up() -> None:
    """And a table of ranks has each: the alike ones together for people, each for programs."""
    assert peers_summary() in PAGE.read_text(encoding="utf-8")
    (gpipe,) = (own for own in committed() if (own.name, own.ranks) == ("gpipe", 4))
    _, _, first, last = peers_table([gpipe], "text").splitlines()
    assert first.split()[:5] == ["gpipe", "4", "0", "to", "2"] and last.split()[:3] == ["gpipe", "4", "3"]
    data = list(csv.DictReader(StringIO(peers_table([gpipe], "csv"))))
    said = [(int(row["torch bytes"]), float(row["error, torch"])) for row in data]
    assert said == [(own.bytes, own.simulated["torch"].relative_error) for own in gpipe.devices]
    records = json.loads(peers_table([gpipe], "json"))
    assert [(each["runtime"], each["rank"]) for each in records] == [("gpipe", rank) for rank in range(4)]


def test_what_a_report_measured_is_simulated_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ranks, for the runtimes and the number of ranks that are named; what was measured stays."""
    again = tmp_path / "peers.json"
    arguments = ["--from", str(RESULTS), "--only", "zbv", "-n", "4", "-o", str(again)]
    (kept,) = [report for report in committed() if (report.name, report.ranks) == ("zbv", 4)]
    assert main(["peers", *arguments]) == (0 if kept.ok else 1)
    assert read_peers(again).peers == [kept]
    assert all(str(device.bytes) in capsys.readouterr().out for device in kept.devices[:1])


# Requests that are refused


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "1f1d"], "--only: no runtime is called '1f1d'; did you mean '1f1b'?; see --list"),
        (["--only", "dualpipev", "-n", "4", "-m", "6"], "-m 6: dualpipev needs at least 8 micro-batches on 4 ranks"),
        (["-n", "1"], "n: "),
        (["--device", "cuda"], "--device: cuda needs a GPU for each rank; there are 0 for 4 ranks"),
        (["--model", "resnet-50"], "model: unknown model 'resnet-50'; did you mean 'resnet50'"),
        (["--model", "tests.validation.peer_models:norms", "-n", "4"], "n: n=8, but the model has 6 stages"),
        (["--model", "json:dumps"], "json:dumps: must give three things"),
        (["--dtype", "int8"], "dtype: unknown dtype 'int8'"),
    ],
)
def test_refused(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, before any rank is started."""
    assert main(["peers", *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda report: report.pop("request"), "missing required field `request`"),
        (lambda report: report["messages"]["torch"].pop(), "have not one entry for each of `ranks`"),
        (lambda report: report["devices"].pop(), "have not one entry for each of `ranks`"),
        (lambda report: report["devices"][0]["tasks"].pop(), "differ in length"),
        (lambda report: report["request"]["sizes"].update(width="wide"), "expected `int`"),
    ],
)
def test_a_damaged_report_is_refused(
    change: Callable[[dict[str, Any]], object], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(RESULTS.read_text())
    change(content["peers"][0])
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(content))
    assert main(["peers", "--from", str(path)]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in PEERS)
