"""Ranks that torchrun starts: the same replays, told by rank 0 alone."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import numpy as np

from tests.validation.processes import HANGS
from validation.ranks.torchrun import decode_result, encode_result
from validation.replay.case import Case, Outcome, Watched, play_in_process, prepare


def torchrun(*arguments: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Have torchrun start the test's own program."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, "-m", "tests.validation.script", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)


@pytest.mark.slow
def test_replays_under_torchrun_end_where_the_equation_does() -> None:
    """Point to point, collectives, and a schedule that leaves one of the two ranks without a device."""
    found = torchrun("multi-cdp,single-cdp,zero-dp,multi-dp", 2, "", 60)
    assert found.returncode == 0, found.stderr
    names = ("multi-cdp", "single-cdp", "zero-dp", "multi-dp")
    assert found.stdout == "".join(f"{name} True True\n" for name in names)
    assert "rror" not in found.stderr


@pytest.mark.slow
def test_too_few_ranks_end_at_once() -> None:
    """Each rank prints the line, unless another rank that ends first takes it along."""
    found = torchrun("multi-cdp", 3, "", 60)
    lines = [line for line in found.stderr.splitlines() if line.startswith("error:")]
    assert found.returncode != 0
    assert {"error: ranks: 3 devices need one each, and 2 were started; use --nproc-per-node=3"} == set(lines)
    assert "exitcode  : 2" in found.stderr


@pytest.mark.slow
def test_what_goes_wrong_under_torchrun_is_told_once() -> None:
    """By rank 0, of all ranks, and of all that wait."""
    found = torchrun("multi-cdp", 2, "raises", 10)
    lines = [line for line in found.stderr.splitlines() if line.startswith("error:")]
    assert found.returncode != 0
    assert len(lines) == 1
    assert "rank 1: ValueError: as the test wants" in lines[0]
    assert "rank 0: device 0 waited for p2p " in lines[0]


def test_what_ranks_return_comes_out_the_same() -> None:
    """Arrays, keys that are not strings, and readings survive the way to another rank."""
    watches: tuple[Watched, ...] = ("storages", "time")
    for watch in watches:
        outcome = play_in_process(prepare(Case("zero-dp", 2, watch=watch)))[0]
        found = decode_result(encode_result(outcome), Outcome | None)
        assert found.parameters.keys() == outcome.parameters.keys()
        for stage, array in outcome.parameters.items():
            assert found.parameters[stage].dtype == array.dtype
            assert np.array_equal(found.parameters[stage], array)
        rest = [(seen.calls, type(seen.calls), seen.readings, seen.spans) for seen in (outcome, found)]
        assert rest[0] == rest[1]
        assert outcome.readings or outcome.spans
    assert decode_result(encode_result(None), Outcome | None) is None


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="a rank returned what cannot be written: range"):
        encode_result(range(3))
