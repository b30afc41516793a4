"""The source distribution has all that its tests need; a wheel needs no checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conditions import need

PROJECT = Path(__file__).parent.parent
IGNORED = [line.strip("/") for line in (PROJECT / ".gitignore").read_text(encoding="utf-8").splitlines()]


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with no other folder on Python's path than this, and without settings of tests."""
    settings = ("PYTHONPATH", "PYTEST_", "COV", "CDPSIM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    if path:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def can_build() -> bool:
    """Return whether pip and a setuptools that reads our pyproject.toml are installed."""
    try:
        return int(version("setuptools").partition(".")[0]) >= 77 and find_spec("pip") is not None
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made and unpacked outside of any checkout."""
    need(can_build(), "pip and setuptools 77")
    home = tmp_path_factory.mktemp("packaging")
    shutil.copytree(PROJECT, home / "tree", ignore=shutil.ignore_patterns(".git", *IGNORED))
    program = "from setuptools import build_meta; build_meta.build_sdist('..')"
    done = run(sys.executable, "-c", program, cwd=home / "tree")
    assert done.returncode == 0, done.stderr
    [archive] = home.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(home / "unpacked", filter="data")
    [root] = (home / "unpacked").iterdir()
    return root


@pytest.fixture(scope="module")
def installed(unpacked: Path) -> Path:
    """A folder that has what pip installs from the source distribution, and nothing else."""
    folder = unpacked.parents[1] / "installed"
    words = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", folder)
    done = run(sys.executable, "-m", "pip", "install", *words, unpacked, cwd=unpacked.parent)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_source_distribution_has_every_file(unpacked: Path) -> None:
    if not (PROJECT / ".git").exists():
        pytest.skip("is a source distribution itself")
    listed = run("git", "ls-files", "-z", cwd=PROJECT).stdout.split("\0")
    files = {name for name in listed if name and (PROJECT / name).exists()}
    assert len(files) > 500
    assert not [name for name in sorted(files) if not (unpacked / name).exists()]


@pytest.mark.slow
def test_tests_run_in_the_source_distribution(unpacked: Path) -> None:
    """Those of a page and of a room, with pytest's settings and the rooms' own doctests."""
    words = ("-q", "--numprocesses=0", "-p", "no:cacheprovider")
    chosen = ("tests/test_design.py", "tests/files/test_units.py", "cdpsim/schedules/placement.py")
    done = run(sys.executable, "-m", "pytest", *words, *chosen, cwd=unpacked)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_an_installation_has_the_code_and_its_texts(installed: Path) -> None:
    """And its tables, that of errors among them, but no test, page or report."""
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    package = {path.relative_to(PROJECT) for path in (PROJECT / "cdpsim").rglob("*") if path.name != ".gitkeep"}
    harness = {path.relative_to(PROJECT / "validation") for path in (PROJECT / "validation").rglob("*")}
    tables = {path for path in harness if path.suffix == ".toml"}
    harness = tables | {path for path in harness if path.suffix == ".py" or path.parts[0] == "help"}
    wanted = package | {"cdpsim_validation" / path for path in harness}
    wanted = {path for path in wanted if "__pycache__" not in path.parts and path.suffix}
    extra = {path for path in found if path.suffix != ".pyc" and not path.parts[0].endswith(".dist-info")}
    assert extra == wanted | {Path("bin", name) for name in ("cdpsim", "cdpsim-validate")}


@pytest.mark.slow
def test_an_installation_works_anywhere(installed: Path, tmp_path: Path) -> None:
    done = run(sys.executable, installed / "bin" / "cdpsim", "table1", "-n", "2", cwd=tmp_path, path=installed)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Table 1 for N = 2")
    asked = ["simulate", "dp", "--model", "gpt2", "--cluster", "h100-node", "--format", "json"]
    done = run(sys.executable, installed / "bin" / "cdpsim", *asked, cwd=tmp_path, path=installed)
    assert [row["runs"] for row in json.loads(done.stdout)["errors"]] == [5, 5]


def validate(installed: Path, folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed harness in a folder."""
    return run(sys.executable, installed / "bin" / "cdpsim-validate", *words.split(), cwd=folder, path=installed)


@pytest.mark.slow
def test_the_installed_harness_works_anywhere(installed: Path, tmp_path: Path) -> None:
    """It profiles, starts ranks, and calls itself by the name of its script."""
    pytest.importorskip("torch")
    for words in ("profile mlp -n 2 -o f.toml", "replay multi-cdp -n 2 --repeats 0 -o r.json"):
        done = validate(installed, tmp_path, words)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"f.toml", "r.json"}
    shown = validate(installed, tmp_path, "replay --help-all").stdout
    assert shown.startswith("usage: cdpsim-validate replay ")
    assert "torchrun --nproc-per-node=4 -m cdpsim_validation replay" in shown
    assert "python -m" not in shown
    refused = validate(installed, tmp_path, "battery")
    assert refused.stderr == "cdpsim: error: -o/--output: is missing; see cdpsim-validate battery --help\n"


@pytest.mark.slow
def test_the_installed_harness_asks_for_torch_in_one_line(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    program = "import sys; from cdpsim_validation.__main__ import main; sys.exit(main(['--help']))"
    done = run(sys.executable, "-c", program, cwd=tmp_path, path=installed)
    remedy = "is not installed; 2.6 or newer fits: run `pip install 'cdpsim[torch]'`"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"cdpsim: error: torch: {remedy}\n")


COMPILE = """
import sys
from pathlib import Path
for path in map(Path, sys.argv[1:]):
    compile(path.read_bytes(), path, "exec")
print(*sys.version_info[:2], sep=".")
"""


def interpreter(release: str) -> str | None:
    """Return an interpreter of a release of Python, of pyenv or on the path; None if there is none."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{release}.*/bin/python"))
    return str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{release}")


@pytest.mark.parametrize("release", ["3.11", "3.12", "3.13", "3.14"])
def test_each_python_reads_the_code(release: str) -> None:
    """Without a warning, such as one of an escape that will be an error."""
    python = interpreter(release)
    if python is None:
        pytest.skip(f"there is no Python {release}")
    files = [path for folder in ("cdpsim", "validation") for path in (PROJECT / folder).rglob("*.py")]
    done = run(python, "-W", "error", "-c", COMPILE, *files, cwd=PROJECT)
    assert (done.stdout, done.stderr) == (f"{release}\n", "")
