"""Ranks that die, hang, fail or never come, and launchers that end: each named in time, and nothing stays behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.validation.harm import replay_harmed
from tests.validation.known import known
from tests.validation.processes import HANGS, descendants, ended
from validation.ranks.launcher import Ranks
from validation.ranks.member import RankFailure, describe_failures
from validation.replay.case import Case
from validation.replay.contents import ReplayError

CASE = Case("multi-cdp", 3)
SCRIPT = [sys.executable, "-m", "tests.validation.script"]
TIMEOUT = 3


def practised() -> tuple[Ranks, Case]:
    """Give ranks that have replayed a case, which they do again within the time-out on a busy machine too.

    The first time takes ten times as long: ranks profile the case, build its training and open their connections.
    """
    ranks, case = Ranks(3), known(CASE)
    ranks.run(case)
    return ranks, case


def test_what_an_exception_of_a_rank_says_is_escaped() -> None:
    """Colours, and marks that turn the direction of writing, are as in all other errors."""
    failures = {1: RankFailure("ValueError: a\x1b[31m\u202eb")}
    assert str(describe_failures(failures, [2])) == r"rank 1: ValueError: a\x1b[31m\u202eb; rank 2 has not answered"


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        ("killed", r"^rank 1: is gone \(killed by SIGKILL\)"),
        ("leaves", r"^rank 1: is gone \(exit code 0\)"),
        ("raises", r"^rank 1: ValueError: as the test wants;"),
        ("large tensor", r"^rank 1: out of memory: .*you tried to allocate \d+ bytes"),
        ("large array", r"^rank 1: out of memory: Unable to allocate"),
        ("stopped", r"rank 1 has not answered$"),
    ],
)
def test_a_rank_that_comes_to_harm_is_named(harm: str, named: str) -> None:
    """In the middle of a replay; the others say what they waited for."""
    ranks, case = practised()
    begun = time.monotonic()
    with pytest.raises(ReplayError, match=named) as raised, ranks:
        ranks.call(replay_harmed, case, 1, harm, timeout=TIMEOUT)
    assert time.monotonic() - begun < TIMEOUT + 15
    for other in (0, 2):
        assert re.search(rf"rank {other}: device {other} (waited for|cannot begin) p2p ", str(raised.value))
    assert "\n" not in str(raised.value)
    assert ended(ranks.pids, 0)


def test_a_message_that_is_never_sent_is_named() -> None:
    """By the rank that waits for it: which one it is, and between which devices."""
    named = r"rank [02]: device [02] waited for p2p \w+\(t=\d(,i=\d)?,j=\d\) between devices \d, \d: "
    ranks, case = practised()
    with pytest.raises(ReplayError, match=named) as raised, ranks:
        ranks.call(replay_harmed, case, 1, "skips", timeout=TIMEOUT)
    assert "KeyError" not in str(raised.value)


def os_pid(member: object) -> int:
    """A rank's own process."""
    return os.getpid()


def test_a_rank_that_never_joins_is_named() -> None:
    ranks = Ranks(3, start=TIMEOUT)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    begun = time.monotonic()
    with (
        pytest.raises(ReplayError, match=r"^rank \d: waited 3 s at 'start' for rank 1; .*rank 1 has not answered$"),
        ranks,
    ):
        ranks.run(CASE)
    assert time.monotonic() - begun < TIMEOUT + 45
    assert ended(ranks.pids, 0)


def test_who_does_not_come_to_make_groups_is_named() -> None:
    """torch itself would say that a key is missing."""
    with Ranks(2) as ranks:
        ranks.run(Case("multi-cdp", 2))  # without groups
        os.kill(ranks.pids[1], signal.SIGSTOP)
        with pytest.raises(
            ReplayError, match=r"^rank 0: waited (3|[12]\.\d) s at 'groups 1' for rank 1; rank 1 has not answered$"
        ):
            ranks.run(Case("multi-dp", 2), timeout=TIMEOUT)


def test_runs_beside_each_other_do_not_meet() -> None:
    """Nor do they need a port or a file that another could have taken."""
    with Ranks(2) as one, Ranks(2) as other:
        pids = one.call(os_pid), other.call(os_pid)
        assert pids == (one.pids, other.pids)
        assert len(one.run(Case("pp-cdp", 2))) == len(other.run(Case("pp-cdp", 2))) == 2


@contextmanager
def launcher(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher of two ranks, one asleep and one that waits for it, with all processes below it."""
    environment = os.environ | {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder.with_name("torchs own"))}
    command = [*SCRIPT, "multi-cdp", "2", "sleeps", "600"]
    pipe = subprocess.PIPE
    # Tests that run in the background may ignore Ctrl-C, and so may all processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "asleep\n"
            below = descendants(process.pid)
            assert len(below) == 4  # two ranks, what they were forked off, and multiprocessing's own
            yield process, below
        finally:
            process.kill()


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Even one that is stopped, and hears of nothing."""
    with launcher(tmp_path) as (process, below):
        os.kill(below[-1], signal.SIGSTOP)
        process.kill()
        assert ended(below)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """All processes of a terminal receive the signal; only the launcher prints a line."""
    with launcher(tmp_path) as (process, below):
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=HANGS)
        assert (process.returncode, errors) == (130, "")
        assert ended(below)
    assert not list(tmp_path.iterdir())


def run_alone(world: int, port: int) -> subprocess.CompletedProcess[str]:
    """One rank as torchrun would start it, without torchrun and without the others."""
    own = {"RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [*SCRIPT, "multi-cdp", "2", "", str(TIMEOUT)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=HANGS)


@pytest.mark.slow
def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = run_alone(2, port)
    assert (found.returncode, found.stderr) == (2, f"error: MASTER_PORT: {port} is in use; choose another\n")


@pytest.mark.slow
def test_other_ranks_that_torchrun_does_not_start_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = run_alone(2, port)
    assert (found.returncode, found.stderr) == (2, "error: waited 3 s at 'start' for rank 1\n")
