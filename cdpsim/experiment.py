"""Experiment files: a request as TOML or JSON, with its model and its cluster named, beside it, or written out.

    model = "gpt2"                  # a name, or a file beside this one; or [model] and [[model.stages]]
    cluster = "box.toml"

    [run]                           # any option of `cdpsim simulate` by its name
    schedule = "multi-cdp"
    n = 4
    link-jitter = "lognormal:0.1"

What a summary.json records of its request is such a file, too, with the words of `[run]` on top.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdpsim.errors import RequestError, choose, shown
from cdpsim.files import config

ENDINGS = (".toml", ".json")
_FILES = ("model", "cluster", "rule", "schedule")  # what may be a file beside it


def is_experiment(name: str) -> bool:
    """Tell a file with a request from a schedule's name."""
    return name.lower().endswith(ENDINGS)


def words(path: str | Path, known: tuple[str, ...]) -> dict[str, Any]:
    """Read the words of a request, all of which are `known`, from an experiment file or a summary.json."""
    content = config.read_config(path)
    if isinstance(content, Mapping) and "makespan" in content and isinstance(content.get("request"), Mapping):
        content = content["request"]
    if not isinstance(content, Mapping):
        raise RequestError(str(path), f"{shown(content)} is no table; write [run] and the options of a run")
    run = content.get("run", {})
    if not isinstance(run, Mapping):  # the number of a run, as a record has it
        content, run = {**content, "run": run}, {}
    else:
        content = {name: value for name, value in content.items() if name != "run"}
    found: dict[str, Any] = {}
    for name, value in (*run.items(), *content.items()):
        word = name.replace("-", "_")
        try:
            choose("option", word, known)
        except RequestError as error:
            raise RequestError(str(path), str(error)) from None
        if word in found:
            raise RequestError(str(path), f"says {name} twice; say it once")
        if value is None:  # not asked for
            continue
        found[word] = _beside(Path(path), value) if word in _FILES else value
    if "schedule" not in found:
        raise RequestError(str(path), 'names no schedule; write schedule = "multi-cdp", say, under [run]')
    return found


def _beside(path: Path, value: object) -> object:
    """The path of a file that an experiment names, from where it is itself; anything else as it is."""
    if isinstance(value, str) and value.lower().endswith((*ENDINGS, ".csv")):
        return str(path.parent / value)
    return value
