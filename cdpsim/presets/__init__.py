"""Models and clusters that ship with the package: files as users write them, each with a comment that says whence."""

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, nearest
from cdpsim.model import Model


def names(kind: str) -> list[str]:
    """What there is of `models` or `clusters`."""
    folder = files("cdpsim.presets") / kind
    found = (file.name for file in folder.iterdir()) if folder.is_dir() else ()
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def about(kind: str, name: str) -> str:
    """The comment at the beginning of a file: how it was made, and from which sources."""
    lines = text(kind, name).splitlines()
    first = next(k for k, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:first])


def model(name: str) -> Model:
    """Load a model that ships with the package."""
    with as_file(files("cdpsim.presets") / "models" / f"{name}.toml") as path:
        return Model.load(path)


def cluster(name: str) -> Cluster:
    """Load a cluster that ships with the package."""
    with as_file(files("cdpsim.presets") / "clusters" / f"{name}.toml") as path:
        return Cluster.load(path)


def text(kind: str, name: str) -> str:
    """Give the file of a model or cluster that ships with the package, as it is."""
    return (files("cdpsim.presets") / kind / f"{name}.toml").read_text("utf-8")


def find_model(given: str | Path | Model, beside: Sequence[str] = ("unit",)) -> Model:
    """A model by its name here, that of a file, or itself; what is unknown may be meant for a name `beside`, too."""
    if isinstance(given, Model):
        return given
    return model(str(given)) if str(given) in names("models") else Model.load(_existing("model", given, beside))


def find_cluster(given: str | Path | Cluster, beside: Sequence[str] = ("unit",)) -> Cluster:
    """A cluster, as `find_model` finds models."""
    if isinstance(given, Cluster):
        return given
    return cluster(str(given)) if str(given) in names("clusters") else Cluster.load(_existing("cluster", given, beside))


def _existing(option: str, given: str | Path, beside: Sequence[str]) -> str | Path:
    """Tell a misspelt name from a file that is not there."""
    name = str(given)
    if "." not in name and "/" not in name and not Path(name).exists():
        known = [*beside, *names(f"{option}s")]
        raise RequestError(option, f"unknown {option} {name!r}; {nearest(name, known)} (or give a .toml or .json file)")
    return given
