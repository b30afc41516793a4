"""Files of models and clusters: shipped ones by their names, others by their paths."""

import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

from cdpsim.errors import RequestError, UnknownName, short_repr, suggestion
from cdpsim.files import config


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


def preset_text(kind: str, name: str) -> str:
    """Return the text of a model's or a cluster's file in the package."""
    return (files("cdpsim.presets") / kind / f"{name}.toml").read_text("utf-8")


def read_preset(option: str, given: str | Path) -> tuple[object, str]:
    """Return the content of the file of a `model` or a `cluster`, by a name in the package or a path; and its path."""
    if not is_preset(option, given):
        return config.read_config(given), str(given)
    with as_file(files("cdpsim.presets") / f"{option}s" / f"{given}.toml") as path:
        return config.read_config(path), str(path)


def is_preset(option: str, given: object, beside: Sequence[str] = ()) -> bool:
    """Return whether a value names a file of the package; refuse one that is no path, either.

    `beside` are further names to suggest.
    """
    if not isinstance(given, str | Path):
        example = f"{option.title()} of your own"
        problem = f"{short_repr(given)} is no {option}; give a name, a .toml or .json file, or a {example}"
        raise RequestError(option, problem)
    name, shipped = str(given), preset_names(f"{option}s")
    if name not in shipped and "." not in name and "/" not in name and not os.path.lexists(name):
        hint = f"{suggestion(name, [*beside, *shipped])} (or give a .toml or .json file)"
        raise UnknownName(option, f"unknown {option} {short_repr(name)}; {hint}")
    return name in shipped
