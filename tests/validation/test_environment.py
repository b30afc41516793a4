"""The description of a machine: enough to compare results, without the names of users or hosts."""

import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from cdpsim import __version__
from validation.report.environment import environment, source_hash
from validation.training.modules import installed


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


def test_an_installation_in_the_checkout_of_another_project_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one in its virtual environment."""
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr("validation.report.environment._HARNESS", tmp_path / "cdpsim_validation")
    assert environment()["commit"]
    monkeypatch.setattr("validation.report.environment._HARNESS", tmp_path / "site-packages" / "cdpsim_validation")
    assert environment()["commit"] is None


def test_the_code_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of simulator and harness: another byte, name or file of code gives another hash; other files do not."""
    (tmp_path / "cdpsim" / "engine").mkdir(parents=True)
    (tmp_path / "validation").mkdir()
    code = tmp_path / "cdpsim" / "engine" / "fast.py"
    code.write_text("1")
    folders = {name: tmp_path / name for name in ("cdpsim", "validation")}
    monkeypatch.setattr("validation.report.environment._FOLDERS", folders)
    found = [source_hash()]
    code.write_text("2")
    found.append(source_hash())
    code.rename(code.with_name("slow.py"))
    found.append(source_hash())
    for name in ("new.py", "models.toml"):  # tables of models and trials are in such files
        (tmp_path / "validation" / name).touch()
        found.append(source_hash())
    assert len(set(found)) == 5
    (tmp_path / "validation" / "README.md").write_text("text")
    assert source_hash() == found[-1]


def test_transformers_is_told_without_importing_it() -> None:
    assert environment()["transformers"] == installed("transformers")
