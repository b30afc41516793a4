"""The notebooks: two forms that say the same, without outputs, and they run."""

import subprocess
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
pytest.importorskip("nbmake")

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_both_forms_say_the_same(name: str) -> None:
    forms = [jupytext.read(FOLDER / f"{name}{ending}") for ending in (".py", ".ipynb")]
    script, notebook = ([(cell.cell_type, cell.source) for cell in form.cells] for form in forms)
    assert script == notebook, f"run: jupytext --sync notebooks/{name}.py"
    assert not any(cell.get("outputs") for cell in forms[1].cells)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name: str) -> None:
    if "validation" in (FOLDER / f"{name}.py").read_text():
        pytest.importorskip("torch")
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=240", "-n", "0", "-q", f"{name}.ipynb"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
