"""The tables of model and cluster files: one decoder for TOML, JSON and Python, and one way back."""

import functools
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args

import msgspec

from cdpsim.errors import RequestError, suggestion
from cdpsim.files import units
from cdpsim.files import writing as files

_DEEPEST = 1000

T = TypeVar("T")


class _Quantity(type):
    """The type of a field that `read` decodes; msgspec asks it whether the outcome is an instance."""

    read: Callable[[object], object]
    unit: str

    def __instancecheck__(cls, instance: object) -> bool:
        return True


def _quantity(read: Callable[[Any], object], unit: str) -> _Quantity:
    return _Quantity(read.__name__, (), {"read": staticmethod(read), "unit": unit})


# What a field holds, and to msgspec how it is read: for a mere float or int it would refuse the text.
if TYPE_CHECKING:
    Cost: TypeAlias = float | units.Work
    Seconds: TypeAlias = float
    Size: TypeAlias = int
    Speed: TypeAlias = float
    Bandwidth: TypeAlias = float
else:
    Cost = _quantity(units.time_or_work, "s")
    Seconds = _quantity(units.seconds, "s")
    Size = _quantity(units.size_bytes, "B")
    Speed = _quantity(units.speed, "FLOPS")
    Bandwidth = _quantity(units.bandwidth, "B/s")
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]

# Whatever somebody may call it, as long as UTF-8 can write it: who shows a name makes one short line of it.
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=2**16, pattern=r"\A[^\ud800-\udfff]*\Z")]


class ConfigTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a file; made in Python it obeys the same rules, and takes "25 us" too."""

    def __post_init__(self) -> None:
        for field in _fields(type(self)):
            given = getattr(self, field.name)
            if given is field.default:
                continue
            try:  # a text of numpy's becomes one of Python's, which can be written
                value = _convert(str(given) if isinstance(given, str) else given, field.type)
            except msgspec.ValidationError as error:
                raise RequestError(field.name, _lower(str(error))) from None
            msgspec.structs.force_setattr(self, field.name, value)


def read_config(path: str | Path) -> object:
    """Read a .toml or .json file into plain dicts and lists."""
    ending = _ending(path)
    text = files.read_text(path)
    try:
        return _parse_toml(text) if ending == ".toml" else json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise RequestError(str(path), "nested too deeply; write plain tables") from None
    except ValueError as error:
        raise RequestError(str(path), f"not {ending[1:].upper()}: {error}; mend it there") from None


def write_config(path: str | Path, content: Mapping[str, object], *, force: bool = False) -> None:
    """Write plain dicts and lists into a .toml or .json file."""
    text = toml_text(content) if _ending(path) == ".toml" else json_text(content)
    files.write_file(path, [text], force=force)


def toml_text(content: Mapping[str, object]) -> str:
    """Give what a .toml file says."""
    import tomli_w

    return tomli_w.dumps(content)


def json_text(content: Mapping[str, object]) -> str:
    """Give what a .json file says."""
    return msgspec.json.format(msgspec.json.encode(content)).decode() + "\n"


def decode(content: object, form: type[T], subject: str, tables: tuple[type[ConfigTable], ...]) -> T:
    """Turn plain dicts and lists into `form`; an error names the field, also the one that was meant."""
    try:
        return _convert(content, form)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).rpartition(" - at ")
        if not problem:
            problem, place = place, "$"
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
            known = dict.fromkeys(name for table in tables for name in table.__struct_fields__)
            problem = f"unknown field {unknown[1]!r}; {suggestion(unknown[1], known)}"
        raise RequestError(f"{subject}: {place.replace('`', '')}", _lower(problem)) from None


def _convert(content: object, form: type[T]) -> T:
    try:
        return msgspec.convert(content, form, dec_hook=_decode_quantity)
    except UnicodeEncodeError:  # where a text stands in the place of anything else
        raise msgspec.ValidationError("a text in it is no Unicode (it has a surrogate); write it again") from None


def encode(table: ConfigTable) -> dict[str, object]:
    """Turn a table into what a file says of it: quantities with units, defaults left out."""
    values = [(field, getattr(table, field.name)) for field in _fields(type(table))]
    return {field.name: _encode(value, field.type) for field, value in values if value != field.default}


def _encode(value: Any, kind: Any) -> object:
    quantity = next((k for k in (kind, *get_args(kind)) if isinstance(k, _Quantity)), None)
    if quantity is not None:
        return units.quantity_text(value, "FLOP" if isinstance(value, units.Work) else quantity.unit)
    if isinstance(value, ConfigTable):
        return encode(value)
    if isinstance(value, tuple):
        return [encode(part) if isinstance(part, ConfigTable) else part for part in value]
    return value


def _lower(message: str) -> str:
    return message[0].lower() + message[1:]


def _decode_quantity(kind: type[Any], given: object) -> object:
    assert isinstance(kind, _Quantity)
    return kind.read(given)


@functools.cache
def _fields(table: type[ConfigTable]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(table)


def _ending(path: str | Path) -> str:
    ending = Path(path).suffix.lower()
    if ending not in (".toml", ".json"):
        raise RequestError(str(path), "its form is unknown; end its name in .toml or .json")
    return ending


def _parse_toml(text: str) -> object:
    # tomllib takes the square of a dotted key's length: hours for a key that a large file can hold.
    if any(part.count(".") > _DEEPEST for part in re.split(r"[,=\n]", text)):
        raise RecursionError
    return tomllib.loads(text)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return table
