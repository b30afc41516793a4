"""The tables of reference pages; and the fields of files, as these tables have them, derived from their types."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from cdpsim.cluster.topology import OVERLAPS, TOPOLOGY_FIELDS
from cdpsim.model import GRADIENT_TYPES, OFFLOAD, OPTIMIZERS, PRECISIONS, RECOMPUTE, UPDATE_TIMES
from cdpsim.model import runtime as behaviours

PAGES = Path(__file__).parents[2] / "docs" / "reference"
Row = tuple[str, ...]  # of a file's field: its name, value, default, and on a page its meaning

# The words that a field of texts takes, where its type does not say them.
WORDS: Mapping[tuple[str, str], Sequence[str]] = {
    ("_ModelFile", "precision"): tuple(PRECISIONS),
    ("Recipe", "optimizer"): OPTIMIZERS,
    ("Recipe", "gradients"): GRADIENT_TYPES,
    ("Recipe", "update_time"): UPDATE_TIMES,
    ("Recipe", "recompute"): (*RECOMPUTE, "layers:K", "selective:LIST"),
    ("Recipe", "offload"): OFFLOAD,
    ("Runtime", "like"): behaviours.RUNTIMES,
    ("Runtime", "sends"): get_args(behaviours.Sends),
    ("Runtime", "gradients"): get_args(behaviours.Gradients),
    ("Runtime", "gradient_buckets"): get_args(behaviours.GradientBuckets),
    ("Runtime", "updates"): get_args(behaviours.Implementation),
    ("Runtime", "gathers"): get_args(behaviours.Gathers),
    ("Runtime", "reductions"): get_args(behaviours.Reductions),
    ("Runtime", "split_backward"): get_args(behaviours.SplitBackward),
    ("Devices", "overlap"): OVERLAPS,
    ("MeasuredWith", "precision"): tuple(PRECISIONS),
    ("Topology", "kind"): tuple(TOPOLOGY_FIELDS),
    ("Topology", "inside"): ("switch", "mesh"),
    ("Topology", "across"): ("switch", "fat-tree"),
}
_QUANTITIES = {"time_or_work": "time or work", "seconds": "time", "size_bytes": "size"}
_QUANTITIES |= {"sizes_bytes": "size or list of sizes"}
_PLAIN: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.StrType: "text",
    inspect.AnyType: "anything",
}


def tables(page: str) -> dict[str, list[list[Row]]]:
    """Return the rows of all tables of a page, without their titles, by the heading above them."""
    found: dict[str, list[list[Row]]] = {}
    for section in re.split(r"^#+ ", (PAGES / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        lists = re.findall(r"^\|[- |]+\|\n((?:\|.*\n)*)", body, re.MULTILINE)
        if lists:
            found[heading] = [[_cells(line) for line in rows.splitlines()] for rows in lists]
    return found


def _cells(line: str) -> Row:
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])


def require_fields(page: str, forms: Mapping[str, type[msgspec.Struct]]) -> None:
    """Compare the fields of each table of a page, in their order, with those of the type that decodes it."""
    written = tables(page)
    assert list(written) == list(forms)
    for heading, form in forms.items():
        rows = written[heading][0]
        assert [row[:3] for row in rows] == rows_of(form), heading
        assert all(row[3] for row in rows), heading


def rows_of(table: type[msgspec.Struct]) -> list[Row]:
    """Return the fields of a table with their values and defaults, as a page writes them."""
    info = inspect.type_info(table)
    assert isinstance(info, inspect.StructType)
    return [(f"`{field.encode_name}`", _value_text(table, field), default_text(field)) for field in info.fields]


def _value_text(table: type[msgspec.Struct], field: inspect.Field) -> str:
    words = WORDS.get((table.__name__, field.encode_name))
    value = ", ".join(f"`{word}`" for word in words) if words else value_text(field.type)
    may_be_null = isinstance(field.type, inspect.UnionType) and field.type.includes_none
    return f"{value} or null" if field.required and may_be_null else value


def value_text(kind: inspect.Type) -> str:
    """Return what a field takes, in words."""
    match kind:
        case inspect.CustomType(cls=cls):
            return _QUANTITIES.get(cls.__name__, cls.__name__).replace("object", "anything")
        case inspect.IntType(ge=least, le=most, lt=below) | inspect.FloatType(ge=least, le=most, lt=below):
            noun = "integer" if isinstance(kind, inspect.IntType) else "number"
            bounds = {"above": kind.gt, "at least": least, "at most": most, "below": below}
            return ", ".join(
                [noun, *(f"{word} {_number(bound)}" for word, bound in bounds.items() if bound is not None)]
            )
        case inspect.UnionType(types=types):
            return " or ".join(value_text(each) for each in types if not isinstance(each, inspect.NoneType))
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return f"list of {_plural(item)}"
        case inspect.TupleType(item_types=items):
            return f"list of {len(items)} {_plural(items[0])}"
        case inspect.DictType(value_type=value):
            return f"table of {_plural(value)}"
        case inspect.NamedTupleType():
            return "list"
        case inspect.StructType():
            return "table"
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
    return _PLAIN[type(kind)]


def _plural(kind: inspect.Type) -> str:
    return re.sub("(integer|number|text|table|list)", r"\1s", value_text(kind), count=1)


def _number(bound: float) -> str:
    if bound >= 10**9 and math.log2(bound) % 1 == 0:
        return f"2^{math.log2(bound):g}"
    return f"{bound:g}".replace("e+0", "e").replace("e-0", "e-") if bound >= 10**9 or bound < 1 else f"{bound:,.0f}"


def default_text(field: inspect.Field) -> str:
    """Return the default of a field: a dash where nothing is there unless it is given."""
    if field.required:
        return "required"
    default: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if default in (None, "", (), [], {}) or isinstance(default, msgspec.Struct):
        return "–"
    if isinstance(default, bool):
        return str(default).lower()
    return f"`{default}`" if isinstance(default, str) or math.isinf(default) else f"{default:g}"
