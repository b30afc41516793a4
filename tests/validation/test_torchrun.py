"""Ranks that torchrun starts: the same replays, told by rank 0 alone."""

import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("torch")

import numpy as np

from validation.replay import Outcome
from validation.torchrun import decode, encode


def torchrun(*arguments: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Have torchrun start the test's own program."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, "-m", "tests.validation.script", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_replays_under_torchrun_end_where_the_equation_does() -> None:
    """Point to point, collectives, and a schedule that leaves one of the two ranks without a device."""
    found = torchrun("multi-cdp,single-cdp,zero-dp,multi-dp", 2, "", 60)
    assert found.returncode == 0, found.stderr
    names = ("multi-cdp", "single-cdp", "zero-dp", "multi-dp")
    assert found.stdout == "".join(f"{name} True True\n" for name in names)
    assert "rror" not in found.stderr


def test_too_few_ranks_end_at_once() -> None:
    """Each with its line: whoever goes first may take the others along."""
    found = torchrun("multi-cdp", 3, "", 60)
    lines = [line for line in found.stderr.splitlines() if line.startswith("error:")]
    assert found.returncode != 0
    assert {"error: ranks: 3 devices need one each, and 2 were started; use --nproc-per-node=3"} == set(lines)
    assert "exitcode  : 2" in found.stderr


def test_what_goes_wrong_under_torchrun_is_told_once() -> None:
    """By rank 0, of all ranks, and of all that wait."""
    found = torchrun("multi-cdp", 2, "raises", 5)
    lines = [line for line in found.stderr.splitlines() if line.startswith("error:")]
    assert found.returncode != 0
    assert len(lines) == 1
    assert "rank 1: ValueError: as the test wants" in lines[0]
    assert "rank 0: device 0 waited for p2p " in lines[0]


def test_what_ranks_return_comes_out_the_same() -> None:
    """Arrays of any type and shape, and keys that are not strings."""
    arrays = {0: np.arange(3.0), 5: np.ones((2, 0, 3), np.float32)}
    outcome = Outcome(arrays, Counter({("send", (1,), 8): 3, ("reduce", (0, 2), 0): 1}))
    found = decode(encode(outcome), Outcome | None)
    assert found.calls == outcome.calls and type(found.calls) is Counter
    for stage, array in arrays.items():
        assert np.array_equal(found.parameters[stage], array)
        assert (found.parameters[stage].dtype, found.parameters[stage].shape) == (array.dtype, array.shape)
    assert decode(encode(None), Outcome | None) is None


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="a rank returned what cannot be written: range"):
        encode(range(3))
