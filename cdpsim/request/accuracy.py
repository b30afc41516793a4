"""How far off answers have been, where those of their class were measured: the rows of a table that the harness makes.

The table lies beside this package, as the harness does: in a wheel in `cdpsim_validation/results`, in a checkout in
`validation/results`. Nothing of the harness is imported.
"""

import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import msgspec

from cdpsim.files.units import Work, counted
from cdpsim.model.runtime import LIKE, PAPER, TRANSFORMERS
from cdpsim.request import Request


class KnownError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The errors of a class of answers on a kind of device, as shares of what was measured.

    `mean` is that of their amounts, `lowest` and `largest` have signs. A class that was not measured has no `runs`.
    """

    of: str  # steps, memory or messages
    by: str  # how they are predicted, or whose they are
    runs: int
    on: str | None = None  # CPU, or a kind of GPU
    machines: tuple[str, ...] = ()
    mean: float | None = None
    lowest: float | None = None
    largest: float | None = None

    def __str__(self) -> str:
        if not self.runs:
            return "not measured"
        mean, low, high = (float(f"{100 * (share or 0):.2g}") for share in (self.mean, self.lowest, self.largest))
        return f"{mean:g} % ({low:+g} to {high:+g} %, {counted(self.runs, 'run')} on {self.on})"


def errors_of(request: Request, devices: int) -> tuple[KnownError, ...]:
    """Return the errors of the classes of a request's step, memory and messages; in slots none."""
    names = () if request.in_slots else _classes(request, devices * request.model.mesh.team)
    return tuple(row for name in names for known, row in _rows_of_classes() if known == name)


def times_errors(request: Request, devices: int) -> tuple[KnownError, ...]:
    """Return the errors of the classes of a request's step and messages alone."""
    return tuple(error for error in errors_of(request, devices) if error.of != "memory")


def _classes(request: Request, ranks: int) -> Iterator[str]:
    """Yield the names of classes: by where times come from, and by whose memory is simulated on so many ranks."""
    model, machine, torch = request.model, request.pricing, LIKE[request.runtime.like] == "torch"
    by_work = "flop" if isinstance(model.stages[0].forward, Work) else "stage times"
    yield "kernels" if machine is not None and machine.device.kernels is not None else by_work
    if any(stage.activation or stage.parameters for stage in model.stages):
        shape = "eager" if request.runtime.like == TRANSFORMERS else "shape"
        yield from ["torch"] * torch + [shape] * (model.layers is not None)
        if model.layers is None and not torch:
            yield "other" if request.runtime != PAPER else "passes" if ranks == 1 else "paper"
    if ranks > 1 and not request.machine.is_free:
        yield "nccl"


@cache
def _rows_of_classes() -> list[tuple[str, KnownError]]:
    """Return the rows of all classes with their names; none where this package lies alone."""
    paths = [Path(__file__).parents[2] / name / "results/classes.toml" for name in ("cdpsim_validation", "validation")]
    for path in filter(Path.exists, paths):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["errors"]
        return [(row["class"], msgspec.convert(row, KnownError)) for row in rows]
    return []


def error_tables(errors: tuple[KnownError, ...]) -> list[dict[str, object]]:
    """Return errors as JSON has them."""
    return [*msgspec.json.decode(msgspec.json.encode(errors))]


def error_words(errors: Iterable[KnownError]) -> list[str]:
    """Return the errors of each class in words."""
    classes = groupby(errors, lambda error: f"of {error.of} {error.by}")
    return [f"{words}: {', '.join(map(str, rows))}" for words, rows in classes]


def error_notes(errors: Iterable[KnownError]) -> list[str]:
    """Return the line of errors below a table; none in slots."""
    return [f"mean error {words}" for words in ["; ".join(error_words(errors))] if words]
