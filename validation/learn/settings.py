"""Settings of a training: given ones, the paper's, and the usual ones."""

import tomllib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch

from cdpsim.cli.parser import Argument, argument
from cdpsim.errors import RequestError, choose, short_repr, whole_number
from cdpsim.files.units import size_bytes
from cdpsim.request.options import flag_of

from .data import ALL_DATA, Data
from .networks import CUTS, FIXED, NETWORKS, Sizes, usual_network
from .training import Course
from .updates import KINDS, Update

Settings = Mapping[str, str]  # by the names of options
NUMBER_TYPES = {"float32": torch.float32, "float64": torch.float64}


class Setting(NamedTuple):
    """A setting of a training: an option of `learn`, and its value where none is given; None depends on the data."""

    name: str
    metavar: str
    about: str
    usual: str | None = None

    @property
    def argument(self) -> Argument:
        """Its option on a command line."""
        about = f"{self.about} (default {self.usual})" if self.usual else self.about
        return argument(flag_of(self.name), metavar=self.metavar, help=about)


OF_NETWORK = (
    Setting("data", "DATA", ", ".join(ALL_DATA), "digits"),
    Setting("network", "NAME", f"{', '.join(NETWORKS)} (default: as the data are)"),
    Setting("layers", "K", "its layers (default 8, or N)"),
    Setting("width", "K", "numbers, or channels, between layers (default 32)"),
    Setting("cut", "HOW", "layers: equally many in each stage; flops: like work", "layers"),
    Setting("dtype", "TYPE", " or ".join(NUMBER_TYPES), "float32"),
)
OF_TRAINING = (
    Setting("optimizer", "NAME", ", ".join(KINDS), "momentum"),
    Setting("lr", "RATES", "one rate, or several with commas between them", "0.05"),
    Setting("momentum", "MU", "of momentum, nesterov and muon", "0.9"),
    Setting("weight_decay", "DECAY", "of all parameters", "0"),
    Setting("drops", "SHARES", "shares of the training, after which rates are lower: 0.3,0.6,0.9", ""),
    Setting("drop_by", "FACTOR", "factor of the rates from then on", "0.2"),
    Setting("warm_up", "B", "batches over which rates rise", "0"),
    Setting("epochs", "E", "times that all samples are seen", "20"),
    Setting("batch", "B", "samples of an update", "64"),
    Setting("seeds", "S", "runs with other starts and orders", "10"),
)
OF_VERDICTS = (
    Setting("margin", "POINTS", "differences of accuracy that do not matter", "0.5"),
    Setting("best_of", "E", "number of last epochs whose best accuracy counts", "1"),
)
OF_MACHINE = (
    Setting("device", "DEVICE", "cpu or cuda", "cpu"),
    Setting("max_memory", "SIZE", "memory of the runs that are trained at once", "4 GiB"),
)
SETTINGS = {each.name: each for each in (*OF_NETWORK, *OF_TRAINING, *OF_VERDICTS, *OF_MACHINE)}
# Fournier and Oyallon, section 5, by the data. Of a ResNet-50, the decay is another one with some.
_PAPERS: Mapping[str, Settings] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_DECAYS_OF_RESNET_50 = {"cifar10": "1e-3"}


def settings_of(given: Settings, *, like_paper: bool = False) -> dict[str, str]:
    """Return all settings of a training: the given ones, else the paper's, else the usual ones."""
    usual = {name: each.usual for name, each in SETTINGS.items() if each.usual is not None}
    kind = given.get("data", usual["data"]).partition(":")[0]
    paper: dict[str, str] = {}
    if like_paper:
        if kind not in _PAPERS:
            raise RequestError("like-paper", f"is for {' and '.join(_PAPERS)}; give --data {next(iter(_PAPERS))}:DIR")
        paper = {**_PAPERS[kind]}
        if given.get("network") == "resnet50":
            paper["weight_decay"] = _DECAYS_OF_RESNET_50.get(kind, paper["weight_decay"])
    settings = {**usual, **paper, **given}
    if "momentum" in given and settings["optimizer"] in ("sgd", "adamw"):
        raise RequestError("momentum", f"{settings['optimizer']} has none of its own; leave --momentum out")
    if "drop_by" in given and not settings["drops"]:
        raise RequestError("drop-by", "says nothing without --drops; give both, or leave it out")
    if (network := settings.get("network")) in FIXED:
        for name in ("layers", "width"):
            if name in given:
                raise RequestError(name, f"{network} has sizes of its own; leave --{name} out")
    return settings


def course_of(settings: Settings, data: Data, n: int, *, batch_norm: bool = False, one_by_one: bool = False) -> Course:
    """Return the course of settings, for data and n stages."""
    update = Update(
        choose("optimizer", settings["optimizer"], KINDS),
        read_number("momentum", settings["momentum"]),
        read_number("weight-decay", settings["weight_decay"]),
    )
    drops = read_numbers("drops", settings["drops"]) if settings["drops"] else ()
    drop_by = read_number("drop-by", settings["drop_by"])
    if max(drops, default=0) >= 1:
        raise RequestError("drops", f"{max(drops):g} is after the training; give shares of it, below 1")
    if drop_by > 1:
        raise RequestError("drop-by", f"{drop_by:g} lets rates rise; give a factor of at most 1")
    if choose("device", settings["device"], ("cpu", "cuda")) == "cuda" and not torch.cuda.is_available():
        raise RequestError("device", "cuda needs a GPU that torch can use, and there is none; use --device cpu")
    return Course(
        network=settings.get("network", usual_network(data)),
        sizes=Sizes(
            whole_number("layers", settings.get("layers", max(n, 8)), at_least=max(n, 2)),
            whole_number("width", settings.get("width", "32"), at_least=1),
        ),
        stages=n,
        cut=choose("cut", settings["cut"], CUTS),
        batch_norm=batch_norm,
        update=update,
        rates=read_numbers("lr", settings["lr"]),
        drops=drops,
        drop_by=drop_by,
        warm_up=whole_number("warm-up", settings["warm_up"], at_least=0),
        seeds=whole_number("seeds", settings["seeds"], at_least=1),
        epochs=whole_number("epochs", settings["epochs"], at_least=1),
        batch=whole_number("batch", settings["batch"], at_least=1),
        dtype=NUMBER_TYPES[choose("dtype", settings["dtype"], NUMBER_TYPES)],
        device=settings["device"],
        one_by_one=one_by_one,
        most_bytes=_read_size(settings["max_memory"]),
    )


def read_best_of(settings: Settings, course: Course) -> int:
    """Return the number of last epochs whose best accuracy counts; refuse more than a training has."""
    best_of = whole_number("best-of", settings["best_of"], at_least=1)
    if best_of > course.epochs:
        raise RequestError("best-of", f"{best_of} epochs are more than a training has; give at most {course.epochs}")
    return best_of


def recorded(course: Course) -> dict[str, object]:
    """Return what settings mean where it depends on the data."""
    sizes = {} if course.network in FIXED else {"layers": course.sizes.layers, "width": course.sizes.width}
    return {"network": course.network, **sizes, "batch_norm": course.batch_norm, "vmap": not course.one_by_one}


def _read_size(text: str) -> int:
    try:
        return size_bytes(text)
    except RequestError as error:
        raise RequestError("max-memory", str(error)) from None


def read_numbers(name: str, text: str) -> tuple[float, ...]:
    """Return different numbers of at least 0."""
    return tuple(dict.fromkeys(read_number(name, part) for part in text.split(",")))


def read_number(name: str, text: str) -> float:
    """Return a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise RequestError(name, f"{short_repr(text)} is no number of at least 0")
    return value
