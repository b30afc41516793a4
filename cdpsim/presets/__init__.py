"""Presets: models, clusters and published runs that ship with the package: files whose comments give their sources."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cdpsim.cluster import Cluster
from cdpsim.files.config import is_preset, preset_comment, preset_names, preset_text
from cdpsim.model import Model

__all__ = [
    "cluster",
    "clusters",
    "find_cluster",
    "find_model",
    "model",
    "models",
    "preset_comment",
    "preset_names",
    "preset_text",
]


def models() -> list[str]:
    """Return the names of the models that ship with the package.

    >>> models()[:3]
    ['deepseek-v2', 'deepseek-v3', 'gpt2']
    """
    return preset_names("models")


def clusters() -> list[str]:
    """Return the names of the clusters that ship with the package.

    >>> clusters()[:3]
    ['a100-nodes', 'b200-node', 'grand-teton']
    """
    return preset_names("clusters")


@cache
def model(name: str) -> Model:
    """Return a model that ships with the package."""
    return Model.load(name)


@cache
def cluster(name: str) -> Cluster:
    """Return a cluster that ships with the package."""
    return Cluster.load(name)


def find_model(given: str | Path | Model, beside: Sequence[str] = ("unit",)) -> Model:
    """Return a model by its name in the package, by its file, or itself; `beside` are further names to suggest."""
    if isinstance(given, Model):
        return given
    return model(str(given)) if is_preset("model", given, beside) else Model.load(given)


def find_cluster(given: str | Path | Cluster) -> Cluster:
    """Return a cluster, as `find_model` returns models."""
    if isinstance(given, Cluster):
        return given
    return cluster(str(given)) if is_preset("cluster", given, ("unit",)) else Cluster.load(given)
