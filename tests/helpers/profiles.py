"""The profiles of language models that once shipped, and the cluster of A100 before kernels: data of figures held."""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
A100 = str(DATA / "a100-nodes.toml")


def profiled(name: str) -> str:
    """Return the path of a model's profile."""
    return str(DATA / f"{name}.toml")
