"""Presets: models and clusters that ship with the package, as files whose comments give their sources."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, short_repr, suggestion
from cdpsim.model import Model

Found = TypeVar("Found")


def preset_names(kind: str) -> list[str]:
    """Return the names of all `models` or `clusters` of the package, in alphabetical order."""
    return [*_file_names(kind)]


@cache  # the files of the package do not change while it is used
def _file_names(kind: str) -> tuple[str, ...]:
    folder = files("cdpsim.presets") / kind
    names = (file.name for file in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def preset_comment(kind: str, name: str) -> str:
    """Return the comment at the beginning of a file: how it was made, and from which sources."""
    lines = preset_text(kind, name).splitlines()
    first = next(k for k, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:first])


@cache
def model(name: str) -> Model:
    """Return a model that ships with the package."""
    with as_file(files("cdpsim.presets") / "models" / f"{name}.toml") as path:
        return Model.load(path)


@cache
def cluster(name: str) -> Cluster:
    """Return a cluster that ships with the package."""
    with as_file(files("cdpsim.presets") / "clusters" / f"{name}.toml") as path:
        return Cluster.load(path)


def preset_text(kind: str, name: str) -> str:
    """Return the text of a model's or a cluster's file in the package."""
    return (files("cdpsim.presets") / kind / f"{name}.toml").read_text("utf-8")


def find_model(given: str | Path | Model, beside: Sequence[str] = ("unit",)) -> Model:
    """Return a model by its name in the package, by its file, or itself; `beside` are further names to suggest."""
    return given if isinstance(given, Model) else _find("model", given, beside, model, Model.load)


def find_cluster(given: str | Path | Cluster, beside: Sequence[str] = ("unit",)) -> Cluster:
    """Return a cluster, as `find_model` returns models."""
    return given if isinstance(given, Cluster) else _find("cluster", given, beside, cluster, Cluster.load)


def _find(
    option: str,
    given: object,
    beside: Sequence[str],
    from_package: Callable[[str], Found],
    from_file: Callable[[str], Found],
) -> Found:
    """Return what one of two functions loads: by a name in the package, or by a path that is no misspelt name."""
    if not isinstance(given, str | Path):
        example = f"{option.title()} of your own"
        problem = f"{short_repr(given)} is no {option}; give a name, a .toml or .json file, or a {example}"
        raise RequestError(option, problem)
    name, shipped = str(given), preset_names(f"{option}s")
    if name not in shipped and "." not in name and "/" not in name and not os.path.lexists(name):
        hint = f"{suggestion(name, [*beside, *shipped])} (or give a .toml or .json file)"
        raise RequestError(option, f"unknown {option} {short_repr(name)}; {hint}")
    return from_package(name) if name in shipped else from_file(name)
