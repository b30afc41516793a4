"""Data ranks that share what is split: parameters, memory and messages of each policy, in one process and by ranks."""

import json
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from cdpsim.errors import RequestError
from cdpsim.program import Op
from tests.validation.cases import OPTIMIZERS
from tests.validation.known import known
from validation.__main__ import main
from validation.comparison.command import report_summary
from validation.comparison.replays import SingleProcess, compare_replay
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, expected_parameters, largest_difference, play_in_process, prepare
from validation.replay.equation import grouping_of
from validation.report.schema import Report
from validation.training.optimizer import OPTIMIZERS as KNOWN

LAYERS: dict[str, Any] = {"by_layer": (0, 2), "cuts": (1, 2, 3), "sizes": (("layers", 2),)}  # two in each of two stages
ADAM = {"optimizer": OPTIMIZERS["adam"]}


def case_of(schedule: str = "dp", n: int = 2, *, m: int = 2, **how: Any) -> Case:
    return known(Case(schedule, n, m=m, **{"steps": 2, "optimizer": OPTIMIZERS["momentum"], **how}))


def held(case: Case, players: SingleProcess | Ranks | None = None) -> Report:
    report = compare_replay(case, players or SingleProcess(), repeats=0)
    assert report is not None
    return report


POLICIES: dict[str, dict[str, Any]] = {
    "ddp": {"replicas": 2},
    "ddp, pass by pass": {"replicas": 3, "reduce": "each"},
    "ddp, a bucket for each stage": {"replicas": 2, "buckets": "8 KiB", "whole_first_step": True},
    "zero-1": {"zero": 1, "replicas": 2},
    "zero-1 on three ranks, padded": {"zero": 1, "replicas": 3} | ADAM,
    "zero-1, all before the next forward": {"zero": 1, "replicas": 2, "gather": "step", "reduce": "end"},
    "zero-2": {"zero": 2, "replicas": 2, "m": 3},
    "zero-2, summed once": {"zero": 2, "replicas": 3, "reduce": "last", "model": "transformer"},
    "zero-3": {"shard": 2, "model": "transformer"},
    "zero-3 on three ranks, padded": {"shard": 3, "m": 1} | ADAM,
    "zero-3 in float32": {"shard": 2, "dtype": "float32", "prefetch": 0, "recompute": "full"},
    "parameters that stay": {"shard": 2, "reshard": "no"},
    "parameters that stay for a step": {"shard": 2, "reshard": "step"},
    "parameters of the ends that stay": {"shard": 2, "reshard": "root", "n": 3},
    "parameters that stay in pairs": {"shard": 4, "reshard": 2},
    "parameters that stay in pairs, at other sizes": {"shard": 4, "reshard": 2, "model": "transformer"},
    "groups, zero-1": {"zero": 1, "shard": 3, "replicas": 2},
    "groups, pass by pass": {"zero": 2, "shard": 2, "replicas": 2},
    "groups, zero-3": {"shard": 2, "replicas": 2, "reduce": "end"},
    "one rank in each group": {"zero": 1, "shard": 1, "replicas": 2},
    "1f1b": {"schedule": "1f1b", "shard": 2, "m": 3} | LAYERS,
    "1f1b, buckets": {"schedule": "1f1b", "zero": 1, "replicas": 2, "buckets": "1 MiB"} | LAYERS,
    "1f1b, pass by pass": {"schedule": "1f1b", "zero": 2, "replicas": 2, "reduce": "each"},
    "interleaved": {"schedule": "interleaved-1f1b", "n": 4, "chunks": 2, "zero": 2, "replicas": 2},
    "gpipe, drop after each use": {"schedule": "gpipe", "shard": 2, "reshard": "yes"},
    "zb-h1": {"schedule": "zb-h1", "zero": 2, "replicas": 2} | LAYERS,
    "zb-h1, zero-3": {"schedule": "zb-h1", "shard": 2} | LAYERS,
    "zb-h1, drop after each use": {"schedule": "zb-h1", "shard": 2, "reshard": "yes"} | LAYERS,
}
BY_RANKS = ("ddp", "zero-1", "zero-2, summed once", "zero-3 on three ranks, padded", "groups, pass by pass", "1f1b")


@pytest.mark.parametrize("how", POLICIES.values(), ids=POLICIES)
def test_a_policy_is_within_tolerance(how: dict[str, Any]) -> None:
    """Parameters to the last bit, storages to the byte, each event of the allocator, calls, needs and lifetimes."""
    report = held(case_of(**how))
    assert report.ok, report_summary(report)
    assert report.parameters.bit_equal
    assert report.parameters.nearest is not None and report.parameters.nearest.distance > 1e-9


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as found:
        yield found


@pytest.mark.parametrize("policy", BY_RANKS)
def test_so_it_is_by_ranks(policy: str, ranks: Ranks) -> None:
    """Which add in an order of their own."""
    report = held(case_of(**POLICIES[policy]), ranks)
    assert report.ok, report_summary(report)
    assert report.parameters.tolerance <= 1e-12


@pytest.mark.parametrize("ranks_", [2, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_a_device_has_is_what_its_share_comes_to(zero: int, ranks_: int) -> None:
    """Of one stage of N numbers in float64, with one number of momentum for each: whole, or as 1/k rounded up."""
    numbers = 2 * (16 * 32) + 32 + 16  # of two matrices and two biases
    case = case_of(n=1, zero=zero, replicas=ranks_)
    whole, share = 8 * numbers, 8 * ceil(numbers / ranks_)
    for device in held(case).memory.devices:
        found = {name: each.measured_bytes for name, each in device.categories.items()}
        assert found["optimizer"] == (share if zero else whole)
        assert found["gradients"] == whole + (
            share if zero >= 2 else 0
        )  # the first pass' share beside the second's sum
        assert found["parameters"] == whole + (share if zero == 3 else 0)


@pytest.mark.parametrize("ranks_", [2, 3])
@pytest.mark.parametrize(("zero", "reduced", "gathered"), [(0, 0, 0), (1, 1, 1), (2, 2, 1), (3, 2, 4)])
def test_collectives_are_as_many_as_policies_need(zero: int, reduced: int, gathered: int, ranks_: int) -> None:
    """In a step of two passes through one stage; of steps after the first, as the first has its parameters already."""
    prepared = prepare(case_of(n=1, zero=zero, replicas=ranks_, steps=3))
    kinds = [message.op for message in prepared.plan.messages if message.step == 1]
    assert kinds.count(Op.REDUCE_SCATTER) == reduced
    assert kinds.count(Op.ALL_GATHER) == gathered
    assert kinds.count(Op.ALL_REDUCE) == (zero == 0)
    assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) == 0


def test_sums_are_made_in_groups_and_pass_by_pass() -> None:
    """Micro-batches 2d and 2d + 1 are those of device d; devices 0 and 1 are a group, and 2 and 3."""
    orders = {
        "end": [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]],
        "each": [[[[0], [2]], [[4], [6]]], [[[1], [3]], [[5], [7]]]],
    }
    for reduce, expected in orders.items():
        program = prepare(case_of(zero=2, shard=2, replicas=2, reduce=reduce)).plan.program
        assert grouping_of(program)(range(1), 0) == expected
    assert grouping_of(prepare(case_of(replicas=2, reduce="each")).plan.program)(range(1), 0) == [0, 2, 1, 3]


def test_what_cannot_be_replayed_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"shard": 2, "optimizer": KNOWN["adafactor"]},
            "optimizer: adafactor sums over rows of a tensor",
        ),
        ({"shard": 2, "dtype": "bfloat16"}, "dtype: torch rounds the last of a tensor's 2-byte numbers otherwise"),
        ({"schedule": "pp-cdp", "zero": 1, "replicas": 2}, "zero: shares are updated where older parameters are"),
    ]
    for how, told in refused:
        with pytest.raises(RequestError, match=f"^{told}"):
            prepare(case_of(**how))


def replay(tmp_path: Path, *options: str) -> int:
    output = str(tmp_path / "report.json")
    return main(["replay", *options, "--single-process", "--repeats", "0", "--steps", "2", "-o", output])


def test_the_command_takes_the_options_of_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path, "1f1b", "-n", "2", "-m", "2", "--size", "layers=2", "--shard", "2", "--reshard", "yes") == 0
    assert "\nok\n" in capsys.readouterr().out
    request = json.loads((tmp_path / "report.json").read_text())["request"]
    assert (request["zero"], request["shard"], request["reshard"], request["prefetch"]) == (3, 2, "yes", 1)
    assert request["layers"] == "0,2"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["zero-dp", "--shard", "2"], "shard: zero-dp does not take this option"),
        (["dp", "--zero", "4"], "zero: zero=4, and ZeRO's stages are 0 to 3"),
        (["dp", "--replicas", "2", "--by-layer"], "by-layer: dp does not take this option"),
        (["ddp", "--zero", "2"], "zero: ddp is dp --zero 0, and --zero asks for 2"),
    ],
)
def test_the_command_refuses_what_simulate_refuses(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(tmp_path, *options, "-n", "2") == 2
    assert told in capsys.readouterr().err
