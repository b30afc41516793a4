"""Runs that others measured and published, beside ours: the rows of the files in presets/published."""

import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from math import inf, nan, prod
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import replace

from cdpsim.api import simulate
from cdpsim.errors import choose
from cdpsim.files.notes import progress
from cdpsim.files.tables import Column, PrintedTable
from cdpsim.model import PRECISIONS
from cdpsim.model.splitting import Mesh
from cdpsim.presets import find_model, preset_names, preset_text
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.compare import evaluate

_SIZES = {"s": 1.0, "ms": 1e-3, "GB": 1e9, "GiB": 2**30, "TFLOP/s": 1e12, "tokens/s": 1, "%": 0.01, "M": 1e6}


class PublishedRow(msgspec.Struct, frozen=True):
    """A published value and ours in the same unit, what of ours was fitted to what, and a tolerance, if there is one.

    `off` are the least and the largest relative error, or both by one number, `within` is the largest difference in the
    unit, and `mean` the largest mean error of the rows with this quantity and `about`. Where there is a published step
    `at`, in seconds, ours is a share of a step as long. Of models of measured passes, `update` are the seconds of an
    optimizer's call on a stage, and `gap` those that each layer of a stage adds.
    """

    table: str
    source: str
    row: str
    quantity: str
    unit: str
    published: float
    request: dict[str, Any]
    about: str = ""
    fitted_to: str | None = None
    off: float | tuple[float, float] | None = None
    within: float = inf
    mean: float = inf
    at: float | None = None
    update: float | None = None
    gap: float = 0.0
    ours: float = nan

    @property
    def error(self) -> float:
        """The relative error of our value."""
        return self.ours / self.published - 1

    @property
    def holds(self) -> bool:
        """Whether our value is within the tolerance, if there is one."""
        least, most = self.off if isinstance(self.off, tuple) else (-(self.off or inf), self.off or inf)
        return least <= self.error <= most and abs(self.ours - self.published) <= self.within

    @property
    def tolerance(self) -> str | None:
        """The tolerance in words."""
        if isinstance(self.off, tuple):
            return "{:g} to {:g} %".format(*(100 * share for share in self.off)).replace("-inf to", "at most")
        return f"{100 * self.off:g} %" if self.off else None if self.within == inf else f"± {self.within:g} {self.unit}"

    @property
    def title(self) -> str:
        """The quantity, and what the rows of a group have in common."""
        return ", ".join(filter(None, (self.quantity.replace("_", " "), self.about)))

    def asked(self) -> dict[str, Any]:
        """Return the options of the request."""
        if self.update is None:
            return self.request
        cuts, stages = self.request["cuts"], Request(**self.request).model.stages
        timed = (replace(stage, update=self.update + self.gap * k) for stage, k in zip(stages, cuts, strict=True))
        return self.request | {"model": {"stages": [msgspec.to_builtins(stage) for stage in timed]}, "cuts": None}


def load_published(name: str) -> list[PublishedRow]:
    """Return the rows of a file; a request has options of all, of its group, of the run `of` a name, and its own."""
    file: dict[str, Any] = tomllib.loads(preset_text("published", name))
    runs, models, updates = (file.get(key, {}) for key in ("runs", "models", "updates"))
    common, rows = {"table": name, "source": file["source"], "gap": file.get("gap", 0.0)}, []
    for given, row in ((group, row) for group in file["groups"] for row in group["rows"]):
        request = file["request"] | given.get("request", {}) | runs.get(row.get("of", row["row"]), {})
        model = (request := request | row.get("request", {}))["model"]
        own = {"request": request | {"model": models.get(model, model)}, "update": updates.get(model)}
        rows.append(msgspec.convert(common | given | row | own, PublishedRow))
    return rows


def compare_published(names: Sequence[str] = ()) -> list[PublishedRow]:
    """Return the rows of tables, by default of all, with our values."""
    known = preset_names("published")
    rows = [row for name in [choose("table", name, known) for name in names] or known for row in load_published(name)]
    return [*map(with_ours, progress(rows, "published rows"))]


def with_ours(row: PublishedRow) -> PublishedRow:
    """Return a row with our value, which is that of its quantity or a metric of `evaluate`."""
    asked, quantity = row.asked(), row.quantity
    if quantity in ("forward", "backward", "attention_forward"):  # of the first layer
        value = getattr(Request(**asked).timed_model.stages[1], quantity)
    elif quantity == "parameters":
        model = Request(**asked).model
        value = model.parameter_bytes / PRECISIONS[model.precision]
    elif quantity in ("activations", "matrix_states"):
        value = _of_layers_alone(asked, quantity)
    elif quantity == "states_at_update":
        value = _states_at_update(simulate(**asked))
    elif quantity == "reduction":  # what a step with one data rank and without gaps does not have
        value = evaluate(**asked).step - evaluate(**replace(row, gap=0.0).asked() | {"replicas": 1}).step
    else:
        found = evaluate(**asked)
        value = getattr(found, quantity) * (1 if row.at is None else found.step / row.at)
    return replace(row, ours=float(value) / _SIZES[row.unit])


def _of_layers_alone(asked: dict[str, Any], quantity: str) -> float:
    """Return bytes of the first place without embedding, head, working memory and messages; of states, of matrices."""
    options: dict[str, Any] = {"sequence": False, "recompute": None} | asked
    model, mesh = find_model(options.pop("model")), Mesh(options.pop("tensor"), options.pop("sequence"))
    assert model.layers is not None, "these rows are of layers"
    shaped = model.on(mesh, model.layers, model.samples or 1)
    made = Request(model=replace(shaped, stages=shaped.stages[1:-1], tied=(), layers=None), **options).model
    nothing: Any = {"forward_transient": 0, "backward_transient": 0, "boundary": 0, "sent": None}
    bare = replace(made, stages=tuple(replace(stage, **nothing) for stage in made.stages))
    bare = replace(bare, training=replace(made.training, recompute="none"))
    run = simulate(model=bare, **options | {"recompute": None})
    held = run.peak_memory[0]
    if quantity == "activations":
        return held["activations"]
    shapes = [shape for stage in bare.stages[:: run.devices] for shape in stage.tensors]
    share = sum(prod(shape) for shape in shapes if len(shape) == 2) / sum(map(prod, shapes))
    return share * (held["parameters"] + held["gradients"] + held["optimizer"])


def _states_at_update(run: Run) -> float:
    """Return the bytes of the first device when updates of the last step begin, with nothing on its way."""
    updates = run.tasks[(run.tasks.kind == "U") & (run.tasks.device == 0)]
    begun = updates[updates.step == updates.step.max()].start.min()
    return sum({row.category: row.size for row in run.memory if row.device == 0 and row.time <= begun}.values())


def _in_unit(name: str, row: PublishedRow) -> str:
    value: float = getattr(row, name)
    return f"{value:,.{5 if value < 1e5 else 6}g} {row.unit}"


_PUBLISHED_COLUMNS = (
    *(Column(name, heading="") for name in ("table", "source")),
    Column("row"),
    Column("quantity", heading=""),
    Column("about", heading="quantity", words=lambda row: row.title),
    Column("unit", heading=""),
    *(Column(name, words=partial(_in_unit, name)) for name in ("published", "ours")),
    Column("error", words=lambda row: f"{100 * row.error:+.1f} %"),
    Column("tolerance"),
    Column("holds", lambda row: row.holds if row.tolerance else None, heading=""),
    Column("fitted_to"),
)


def print_published(rows: Sequence[PublishedRow], form: str) -> str:
    """Return rows in one of `DATA_FORMATS`; as text, a table for each source, and a line for each group of rows."""
    parts = [[*each] for _, each in groupby(rows, key=lambda row: row.table)] if form == "text" else [rows]
    lines = [[line for line, _ in summarize_published(part)] for part in parts]
    tables = [
        PrintedTable(_PUBLISHED_COLUMNS, part, heads=[part[0].source], notes=notes, width=inf)
        for part, notes in zip(parts, lines, strict=True)
    ]
    return "\n".join(table.printed(form) for table in tables)


def summarize_published(rows: Sequence[PublishedRow]) -> Iterator[tuple[str, bool]]:
    """Yield a line on the errors of each group of rows, and whether all is within its tolerance."""
    for title, each in groupby(rows, key=lambda row: f"{row.table}, {row.title}"):
        group = [*each]
        errors, most = [100 * abs(row.error) for row in group], 100 * group[0].mean
        words = f"mean {fmean(errors):.1f} %" + (f" of at most {most:g} %" if most < inf else "")
        holds = all(row.holds for row in group) and fmean(errors) <= most
        held = "not held" if not holds else "held" if group[0].tolerance else "shown only"
        words += f", largest {max(errors):.1f} %, {held}"
        words += f"; fitted to {group[0].fitted_to}" if group[0].fitted_to else "; nothing fitted"
        yield f"{title}: {words}", holds
