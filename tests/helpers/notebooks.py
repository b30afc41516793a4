"""Notebooks, executed in a folder of their own.

`python -m tests.helpers.notebooks NAME ...` writes notebooks/NAME.ipynb again from notebooks/NAME.py, with its outputs.
"""

import base64
import io
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jupytext
import matplotlib.image
import nbformat
import numpy as np
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
_KEPT = ("text/plain", "text/html", "image/png")


def read_script(name: str) -> Any:
    """Return the notebook that a script says, without outputs."""
    return jupytext.read(FOLDER / f"{name}.py")


def execute(name: str, folder: Path) -> Any:
    """Return a notebook as its script says it, executed in `folder`; what differs between two runs is left out."""
    notebook = read_script(name)
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    client = NotebookClient(notebook, timeout=240, coalesce_streams=True, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    notebook.metadata.pop("language_info", None)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        for output in cell.get("outputs", []):
            if "data" in output:
                output.data = {kind: value for kind, value in output.data.items() if kind in _KEPT}
                output.metadata = {}
    return notebook


def text_of(output: Mapping[str, Any]) -> Any:
    """Return all of an output but its image."""
    return {key: text_of(value) if key == "data" else value for key, value in output.items() if key != "image/png"}


def image_of(output: Mapping[str, Any]) -> np.ndarray | None:
    """Return the pixels of an output, if it has some."""
    encoded = output.get("data", {}).get("image/png")
    return None if encoded is None else matplotlib.image.imread(io.BytesIO(base64.b64decode(encoded)))


def main() -> None:
    """Write notebooks with their outputs."""
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(name, Path(folder)), FOLDER / f"{name}.ipynb")
        print(f"notebooks/{name}.ipynb")


if __name__ == "__main__":
    main()
