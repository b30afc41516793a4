"""Models and clusters that ship with the package: files as users write them, each with a comment that says whence."""

import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, short_repr, suggestion
from cdpsim.model import Model


def preset_names(kind: str) -> list[str]:
    """What there is of `models` or `clusters`."""
    return [*_names(kind)]


@cache  # as `model` and `cluster`: what ships with the package does not change while it is used
def _names(kind: str) -> tuple[str, ...]:
    folder = files("cdpsim.presets") / kind
    found = (file.name for file in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def preset_comment(kind: str, name: str) -> str:
    """The comment at the beginning of a file: how it was made, and from which sources."""
    lines = preset_text(kind, name).splitlines()
    first = next(k for k, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:first])


@cache
def model(name: str) -> Model:
    """Load a model that ships with the package."""
    with as_file(files("cdpsim.presets") / "models" / f"{name}.toml") as path:
        return Model.load(path)


@cache
def cluster(name: str) -> Cluster:
    """Load a cluster that ships with the package."""
    with as_file(files("cdpsim.presets") / "clusters" / f"{name}.toml") as path:
        return Cluster.load(path)


def preset_text(kind: str, name: str) -> str:
    """Give the file of a model or cluster that ships with the package, as it is."""
    return (files("cdpsim.presets") / kind / f"{name}.toml").read_text("utf-8")


def find_model(given: str | Path | Model, beside: Sequence[str] = ("unit",)) -> Model:
    """A model by its name here, that of a file, or itself; what is unknown may be meant for a name `beside`, too."""
    if isinstance(given, Model):
        return given
    name = _name("model", given)
    return model(name) if name in preset_names("models") else Model.load(_existing("model", name, beside))


def find_cluster(given: str | Path | Cluster, beside: Sequence[str] = ("unit",)) -> Cluster:
    """A cluster, as `find_model` finds models."""
    if isinstance(given, Cluster):
        return given
    name = _name("cluster", given)
    return cluster(name) if name in preset_names("clusters") else Cluster.load(_existing("cluster", name, beside))


def _name(option: str, given: object) -> str:
    """The text of a name or path."""
    if not isinstance(given, str | Path):
        made = f"{option.title()} of your own"
        raise RequestError(
            option, f"{short_repr(given)} is no {option}; give a name, a .toml or .json file, or a {made}"
        )
    return str(given)


def _existing(option: str, name: str, beside: Sequence[str]) -> str:
    """Tell a misspelt name from a file that is not there."""
    if "." not in name and "/" not in name and not os.path.lexists(name):
        known = [*beside, *preset_names(f"{option}s")]
        meant = f"{suggestion(name, known)} (or give a .toml or .json file)"
        raise RequestError(option, f"unknown {option} {short_repr(name)}; {meant}")
    return name
