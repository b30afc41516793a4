"""What is said of a machine: enough to compare results, and nothing of whose it is."""

import socket
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from cdpsim import __version__
from validation.report.environment import environment


def test_versions_and_machine_are_there() -> None:
    found = environment()
    assert (found["cdpsim"], found["torch"]) == (__version__, torch.__version__)
    assert isinstance(found["cpu"], dict)
    assert found["cpu"]["threads"] == torch.get_num_threads()
    taken = datetime.strptime(str(found["date"]), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - taken).total_seconds()) < 60


def test_it_is_plain_json_and_says_nothing_of_gpus_that_were_not_used() -> None:
    found = environment()
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
    assert "cuda" not in found


def test_no_names_of_hosts_or_folders() -> None:
    said = msgspec.json.encode(environment()).decode()
    for name in (socket.gethostname(), str(Path.home()), str(Path.cwd())):
        assert f'"{name}' not in said


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"] is None
