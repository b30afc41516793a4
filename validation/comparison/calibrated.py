"""The files of a calibration: the options of training that they say, which a replay takes or refuses, and stages."""

import argparse
import re
from dataclasses import replace

from msgspec import structs

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, whole_number
from cdpsim.model import Model, Recipe
from cdpsim.model.recipe import apply_recipe

from ..profile.command import PRECISIONS, read_sizes
from ..replay.case import Case, build_training

Values = dict[str, str]  # of options, as on the command line: `--dtype` or `--size width`
_USUAL_VALUES: Values = {"--model": "mlp", "--batch": "4", "--dtype": "float64", "--optimizer": "momentum"}
_MIXED = " --mixed-precision"
_TYPES = {precision: dtype for dtype, precision in PRECISIONS.items()}


def take_from_files(options: argparse.Namespace) -> None:
    """Set the options of training that are not given to those of a calibration's files, or to the usual ones.

    Refuse a value that is given, or that is one file's, where another file has another one.
    """
    files: list[tuple[str, Values]] = []
    if options.stages is not None:
        files.append((options.stages, _values_of_stages(Model.load(options.stages))))
    if options.cluster is not None:
        files.append((options.cluster, _values_of_cluster(Cluster.load(options.cluster))))
    files = [(path, {option: value for option, value in values.items() if value}) for path, values in files]
    kind = next((values["--optimizer"] for _, values in files if "--optimizer" in values), _USUAL_VALUES["--optimizer"])
    owner: dict[str, str] = {}
    found = _given_values(options, kind.removesuffix(_MIXED))
    for path, values in files:
        for option, value in values.items():
            if found.setdefault(option, value) != value:
                raise RequestError(path, _two_values(option, value, found[option], owner.get(option)))
            owner.setdefault(option, path)
    found = _USUAL_VALUES | found
    options.mixed_precision = found["--optimizer"].endswith(_MIXED)
    options.optimizer = found["--optimizer"].removesuffix(_MIXED)
    options.model, options.batch, options.dtype = found["--model"], found["--batch"], found["--dtype"]
    sizes = {option.removeprefix("--size "): value for option, value in found.items() if option.startswith("--size ")}
    options.size = [f"{name}={value}" for name, value in sizes.items()]


def _given_values(options: argparse.Namespace, kind: str) -> Values:
    """Return the values of a command line; mixed precision alone is that of an optimizer of this kind."""
    given = {"--model": options.model, "--dtype": options.dtype}
    if options.batch is not None:
        given["--batch"] = str(whole_number("batch", options.batch, at_least=1))
    if options.optimizer or options.mixed_precision:
        given["--optimizer"] = (options.optimizer or kind) + _MIXED * options.mixed_precision
    given |= {f"--size {name}": str(size) for name, size in read_sizes(options.size).items()}
    return {option: value for option, value in given.items() if value is not None}


def _values_of_stages(model: Model) -> Values:
    """Return the values that a model file says; stages without a state, of which nothing is said, are sgd's."""
    said = re.fullmatch(r"(.*?)((?: \w+=\d+)*)", model.source, re.DOTALL)
    name, sizes = said.groups() if said else ("", "")
    optimizer = model.training.optimizer or ("" if model.size("optimizer").any() else "sgd")
    found = {
        "--model": name,
        "--batch": str(model.samples or ""),
        "--dtype": _TYPES.get(model.precision, ""),
        "--optimizer": optimizer + _MIXED * model.training.mixed_precision,
    }
    return found | {f"--size {size}": number for size, number in re.findall(r"(\w+)=(\d+)", sizes)}


def _values_of_cluster(cluster: Cluster) -> Values:
    if (said := cluster.measured_with) is None:
        return {}
    batch, dtype = str(said.samples or ""), _TYPES.get(said.precision, "")
    return {"--batch": batch, "--dtype": dtype, "--optimizer": said.optimizer}


def _two_values(option: str, said: str, other: str, path: str | None) -> str:
    """Return that a file says one value of an option, and another one is given, or is that of the file at a path."""
    name, equals = (option, "=") if option.startswith("--size ") else (option, " ")
    one, two = f"{name}{equals}{said}", f"{name}{equals}{other}"
    if path is None:
        return f"is of {one}, and {two} is given; leave that out, or calibrate with it"
    return f"is of {one}, and {path} of {two}; take two files of one calibration"


def read_stages(path: str, case: Case) -> Model:
    """Return the stages of a model file, which recompute and offload as the case does; refuse those of another model.

    The state of an optimizer that the file names is what torch keeps for the case's.
    """
    model, n = Model.load(path), case.shape.n
    if model.n != n:
        raise RequestError(path, f"has {model.n} stages, not n={n}; profile the model with -n {n}")
    if model.tied:
        problem = f"ties stages {list(model.tied[0].stages)}, and a replay trains each by itself; leave [[tied]] out"
        raise RequestError(path, problem)
    if case.recompute in ("layer+head", "sqrt"):
        kept = f"of which --recompute {case.recompute} keeps the inputs"
        problem = f"does not say what the segments of its stages hold, {kept}"
        raise RequestError(path, f"{problem}; leave --stages out, or take --recompute full")
    asked = {name: how for name in ("recompute", "offload") if (how := getattr(case, name)) != "none"}
    recipe = structs.replace(model.training, optimizer=None, mixed_precision=False, update_time="stated", **asked)
    return apply_recipe(_with_states(path, model, case), recipe)


def _with_states(path: str, model: Model, case: Case) -> Model:
    """Return a model whose stages say what the case's optimizer keeps for them; refuse stages of other bytes."""
    training, optimizer = build_training(case), replace(case.optimizer, on_host=False)
    alone = replace(optimizer, keeps_base=False)
    is_said = model.training.optimizer is None and model.size("optimizer").any()
    stages = []
    for j, stage in enumerate(model.stages):
        own, kept = training.parameters(j).nbytes, alone.nbytes(training.parts(j))
        if stage.parameters != own:
            problem = f"stage {j} has {stage.parameters:,} B of parameters, and that of {case.model} {own:,} B"
            raise RequestError(path, f"{problem}; give the --model, --size and --partition that the file was made with")
        if is_said and stage.optimizer != kept:
            problem = f"stage {j} has {stage.optimizer:,} B of optimizer state, and {alone.name} keeps {kept:,} B"
            raise RequestError(path, f"{problem}; give the --optimizer that the file was made with")
        stages.append(structs.replace(stage, optimizer=optimizer.nbytes(training.parts(j))))
    return structs.replace(model, stages=tuple(stages), training=Recipe())
