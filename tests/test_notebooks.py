"""The notebooks: executed again, they print and draw what is stored in them."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")

import cdpsim  # noqa: E402
from tests.helpers import notebooks  # noqa: E402

REMEDY = "run: python -m tests.helpers.notebooks"
DOCUMENTED = {"cdpsim.draw.text"}  # modules that pages of docs/ name
HARNESS = {"cdpsim_validation.__main__", "validation.__main__"}


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_executed_again_has_the_outputs_that_are_stored(name: str, tmp_path: Path) -> None:
    """In a folder with nothing in it. Pixels may differ by the rounding of another processor."""
    if "validation" in (notebooks.FOLDER / f"{name}.py").read_text(encoding="utf-8"):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    stored = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", 4)
    again = notebooks.execute(name, tmp_path)
    for old, new in zip(stored.cells, again.cells, strict=True):
        assert (old.cell_type, old.source) == (new.cell_type, new.source), REMEDY
        outputs = old.get("outputs", []), new.get("outputs", [])
        assert [notebooks.text_of(output) for output in outputs[0]] == [notebooks.text_of(each) for each in outputs[1]]
        for before, now in zip(*(map(notebooks.image_of, some) for some in outputs), strict=True):
            assert (before is None) == (now is None)
            if before is not None and now is not None:
                assert before.shape == now.shape, REMEDY
                assert (abs(before - now) > 0.1).mean() < 0.001, REMEDY


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_both_forms_of_a_notebook_have_the_same_cells_and_one_has_outputs(name: str) -> None:
    stored, script = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", 4), notebooks.read_script(name)
    cells = [[(cell.cell_type, cell.source) for cell in form.cells] for form in (stored, script)]
    assert cells[0] == cells[1], REMEDY
    assert any(notebooks.image_of(output) is not None for cell in stored.cells for output in cell.get("outputs", []))


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_uses_the_public_api(name: str) -> None:
    """It names its requirements, imports no other module of the package, and has no path of a machine."""
    text = (notebooks.FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert "# Needs `pip install " in text
    assert str(Path.home()) not in (notebooks.FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    tree = ast.parse(text)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {module for module in imported if module and module.split(".")[0] in {"cdpsim", "tests"}}
    assert ours <= {"cdpsim"} | DOCUMENTED
    assert {module for module in imported if module and "validation" in module} in (set(), HARNESS)
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cdpsim"
    }
    assert names <= set(cdpsim.__all__)
