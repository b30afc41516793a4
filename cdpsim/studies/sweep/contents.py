"""The models, clusters and files of a sweep: read once, known by a digest, varied by paths into them."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, short_repr, suggestion
from cdpsim.files.config import is_preset, read_preset
from cdpsim.model import UNIT_MODELS, Model
from cdpsim.request.options import choose_option
from cdpsim.studies.sweep.axes import SweepFile, canonical, dimensions_of, left_out_of, lowest_form
from cdpsim.studies.sweep.points import SweepPlan, value_key
from cdpsim.studies.sweep.questions import find_question

_READERS: dict[str, Callable[[object, str], Any]] = {"model": Model.from_builtins, "cluster": Cluster.from_builtins}
_OF_SLOTS = (*UNIT_MODELS, "unit")
_FILE_OPTIONS = ("schedule", "rule", "counts")
_MOST_OBJECTS = 4096  # models and clusters that a process keeps


def sweep_plan_of(given: SweepFile, folder: Path) -> SweepPlan:
    """Return the plan of a sweep: all names, files and paths are found; `folder` is where relative paths begin."""
    question = find_question(given.what)
    fixed = {name.replace("-", "_"): lowest_form(value) for name, value in given.fixed.items()}
    dimensions = dimensions_of(given)
    plan = SweepPlan(given.what, fixed, dimensions, left_out_of(given, dimensions))
    paths = [axis.of for axis in plan.axes if "." in axis.of]
    for option in [*fixed, *(axis.of for axis in plan.axes if axis.of not in paths)]:
        choose_option(option, question.options)
    for option in question.needed:
        if option not in fixed and option not in (axis.of for axis in plan.axes):
            raise RequestError(option, f"is missing, and {given.what} needs it; give it in [fixed] or as an axis")
    for axis in plan.axes:
        if axis.of in fixed:
            raise RequestError(f"axes.{axis.name}", "is fixed, too; leave either out")
        if axis.name in question.columns and axis.of.replace("_", "-") != axis.name.replace("_", "-"):
            problem = f"is a column of results; give the axis another name, such as of_{axis.name}"
            raise RequestError(f"axes.{axis.name}", problem)
    _read_contents(plan, folder)
    for path in paths:
        _check_path(plan, path)
    return plan


def _read_contents(plan: SweepPlan, folder: Path) -> None:
    """Read every model, cluster and file that an option names."""
    named = {**{of: [value] for of, value in plan.fixed.items()}, **{axis.of: axis.values for axis in plan.axes}}
    for of in _READERS.keys() & named.keys():
        given = [value for value in named[of] if value not in _OF_SLOTS]
        plan.contents[of] = {value_key(value): _content(of, value, folder) for value in given}
    for of in (of for of in _FILE_OPTIONS if of in named):
        for value in named[of]:
            path = folder / value if isinstance(value, str) and (value.endswith(".csv") or "/" in value) else None
            if path is not None:
                digest = sha256(_bytes_of(of, path)).hexdigest()
                plan.files.setdefault(of, {})[value] = [str(path.resolve()), digest]


def _content(of: str, value: Any, folder: Path) -> Any:
    """Return the content of a model's or cluster's file, with numbers in lowest form."""
    if isinstance(value, str):
        beside = folder / value
        value = read_preset(of, str(beside) if "." in value or "/" in value else value)[0]
    elif not isinstance(value, Mapping):
        is_preset(of, value)  # which refuses it
    return lowest_form(value)


def _bytes_of(of: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(of, f"{path}: {(error.strerror or str(error)).lower()}; check its path") from None


def _check_path(plan: SweepPlan, path: str) -> None:
    """Refuse an axis of a value that no model or cluster of the sweep has, or of which no value can be read."""
    of = path.partition(".")[0]
    if of not in _READERS:
        raise RequestError("axes", f"unknown path {short_repr(path)}; it begins with model. or cluster.")
    if not plan.contents.get(of):
        raise RequestError("axes", f"{path} is of a {of} file, and the sweep has none; give a {of} in [fixed]")
    axis = next(axis for axis in plan.axes if axis.of == path)
    refusals: list[RequestError] = []
    for content in plan.contents[of].values():
        for value in axis.values:
            try:
                _READERS[of](with_value(content, path, value), of)
            except RequestError as error:
                refusals.append(error)
            else:
                return
    raise RequestError(f"axes.{axis.name}", f"no value can be read: {refusals[0]}")


def with_value(content: Any, path: str, value: Any) -> Any:
    """Return the content of a file with another value at a path such as "cluster.link.bandwidth"; numbers are of rows.

    A table that is not in the file is not made; a field of a table is.
    """
    first, *keys = path.split(".")
    return _with_value(content, keys, value, first)


def _with_value(content: Any, keys: Sequence[str], value: Any, before: str) -> Any:
    if not keys:
        return value
    key, *rest = keys
    place = f"{before}.{key}"
    if isinstance(content, list):
        if not (key.isascii() and key.isdigit() and int(key) < len(content)):
            raise RequestError(place, f"is no row; {before} has the rows 0 to {len(content) - 1}")
        row = int(key)
        return [*content[:row], _with_value(content[row], rest, value, place), *content[row + 1 :]]
    if not isinstance(content, Mapping):
        raise RequestError(place, f"{before} is a value and has no {key!r}; end the path there")
    if rest and key not in content:
        raise RequestError(place, f"is not in the file; {suggestion(key, content)}")
    return {**content, key: _with_value(content.get(key), rest, value, place)}


class Objects:
    """The models and clusters of the points of a plan, each made once."""

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._made = lru_cache(_MOST_OBJECTS)(self._make)

    def options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a point: its settings, with models, clusters and files in the place of their names."""
        paths = {of: value for of, value in settings.items() if "." in of}
        options = {of: value for of, value in settings.items() if of not in paths}
        for of in options:
            key = value_key(options[of])
            if key in self._plan.contents.get(of, {}):
                changed = {path: value for path, value in paths.items() if path.startswith(f"{of}.")}
                options[of] = self._made(of, key, canonical(sorted(changed.items())) if changed else b"")
            elif key in self._plan.files.get(of, {}):
                options[of] = self._plan.files[of][key][0]
        return options

    def _make(self, of: str, key: str, changed: bytes) -> Any:
        import msgspec

        content = self._plan.contents[of][key]
        for path, value in msgspec.json.decode(changed) if changed else ():
            content = with_value(content, path, value)
        return _READERS[of](content, of)
