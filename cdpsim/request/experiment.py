"""Experiment files: a request as TOML or JSON; its model and its cluster are names, other files, or written out.

    model = "gpt2"                  # a name, or a file beside this one; or [model] and [[model.stages]]
    cluster = "box.toml"

    [runtime]                       # what a runtime holds: the behaviours of `cdpsim simulate --runtime`
    like = "torch"

    [run]                           # any option of `cdpsim simulate` by its name
    schedule = "multi-cdp"
    n = 4
    link-jitter = "lognormal:0.1"

The request that a summary.json records is also an experiment, with the options of `[run]` at the top level.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdpsim.errors import RequestError, short_repr
from cdpsim.files import config
from cdpsim.request.options import OPTION_NAMES, OPTIONS, choose_option, with_new_names

ENDINGS = (".toml", ".json")


def is_experiment(name: str) -> bool:
    """Return whether a name is that of an experiment file, by its ending, and not of a schedule."""
    return name.lower().endswith(ENDINGS)


def read_experiment(path: str | Path) -> dict[str, Any]:
    """Return the options of the request in an experiment file or a summary.json."""
    content = config.read_config(path)
    if isinstance(content, Mapping) and "makespan" in content and isinstance(content.get("request"), Mapping):
        content = with_new_names(content["request"])
    if not isinstance(content, Mapping):
        raise RequestError(str(path), f"{short_repr(content)} is no table; write [run] and the options of a run")
    if all(name in content for name, option in OPTIONS.items() if option.kept):  # which no record leaves out
        content = with_new_names(content)
    top, run = dict(content), {}
    if isinstance(top.get("run"), Mapping):  # in a record, `run` is the number of a random run
        run = top.pop("run")
    options: dict[str, Any] = {}
    for name, value in (*run.items(), *top.items()):
        option = name.replace("-", "_")
        try:
            choose_option(option, OPTION_NAMES)
        except RequestError as error:
            raise RequestError(str(path), str(error)) from None
        if option in options:
            raise RequestError(str(path), f"says {name} twice; say it once")
        if value is not None:
            may_be_file = option == "schedule" or (option in OPTIONS and OPTIONS[option].may_be_file)
            options[option] = _path_beside(Path(path), value) if may_be_file else value
    if "schedule" not in options:
        raise RequestError(str(path), 'names no schedule; write schedule = "multi-cdp", say, under [run]')
    return options


def _path_beside(path: Path, value: object) -> object:
    """Return the path of a file that an experiment names relative to its own folder; other values unchanged."""
    if isinstance(value, str) and value.lower().endswith((*ENDINGS, ".csv")):
        return str(path.parent / value)
    return value
