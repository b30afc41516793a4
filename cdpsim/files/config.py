"""The tables of model and cluster files: one decoder for TOML, JSON and Python, and one way back.

Files that ship with the package are given by name, others by path.
"""

import functools
import json
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args

import msgspec

from cdpsim.errors import RequestError, UnknownName, one_line, short_repr, suggestion
from cdpsim.files import units, writing

_DEEPEST_KEY = 1000
_INDENT = "    "
_LONG_LIST = re.compile(r"\[\n((?: +\d+,\n){3,})\]")

T = TypeVar("T")


class _Quantity(type):
    """The type of a field that `read` decodes; msgspec takes each value that `read` returns for an instance of it."""

    read: Callable[[object], object]
    unit: str

    def __instancecheck__(cls, instance: object) -> bool:
        return True


def _quantity(read: Callable[[Any], object], unit: str) -> _Quantity:
    return _Quantity(read.__name__, (), {"read": staticmethod(read), "unit": unit})


# The types of fields that are quantities; msgspec sees how they are read, as a mere float or int would refuse a text.
if TYPE_CHECKING:
    Cost: TypeAlias = float | units.Work
    Seconds: TypeAlias = float
    Size: TypeAlias = int
    Sizes: TypeAlias = tuple[int, ...]
    Speed: TypeAlias = float
    Bandwidth: TypeAlias = float
else:
    Cost = _quantity(units.time_or_work, "s")
    Seconds = _quantity(units.seconds, "s")
    Size = _quantity(units.size_bytes, "B")
    Sizes = _quantity(units.sizes_bytes, "B")
    Speed = _quantity(units.speed, "FLOPS")
    Bandwidth = _quantity(units.bandwidth, "B/s")
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]

# Any UTF-8 text; shortened and escaped where it is displayed.
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=2**16, pattern=r"\A[^\ud800-\udfff]*\Z")]


if TYPE_CHECKING:
    from msgspec import StructMeta as _NamedFields
else:
    try:

        class _NamedFields(type(msgspec.Struct)):
            """Refuse positional arguments with the keywords that are meant, of which msgspec says nothing."""

            def __call__(cls, *given, **keywords):
                try:
                    return super().__call__(*given, **keywords)
                except TypeError as error:
                    if not str(error).startswith("Extra positional arguments"):
                        raise
                needed = [field for field in msgspec.structs.fields(cls) if field.required]
                words = ", ".join(f"{field.name}=..." for field in needed or msgspec.structs.fields(cls)[:1])
                raise TypeError(f"{cls.__name__}() takes keywords; write {cls.__name__}({words})")

    except TypeError:  # before 0.20 msgspec has no such classes
        _NamedFields = type(msgspec.Struct)


class ConfigTable(
    msgspec.Struct, metaclass=_NamedFields, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True
):
    """A table of a file; made in Python it obeys the same rules, and takes texts such as "25 us" as well."""

    def __post_init__(self) -> None:
        for field in _fields(type(self)):
            given = getattr(self, field.name)
            if given is field.default:
                continue
            try:  # a text of numpy's becomes one of Python's, which files can have
                value = _convert(str(given) if isinstance(given, str) else given, field.type)
            except msgspec.ValidationError as error:
                raise RequestError(field.name, _uncapitalized(str(error))) from None
            msgspec.structs.force_setattr(self, field.name, value)
        self._check()

    def _check(self) -> None:
        """Refuse fields that do not go together, in a table with such a rule."""

    def __repr__(self) -> str:
        fields = (f"{name}={short_repr(value)}" for name, value in encode(self).items())
        return one_line(f"{type(self).__name__}({', '.join(fields)})")


def read_config(path: str | Path) -> object:
    """Return the content of a .toml or .json file as plain dicts and lists."""
    ending = _ending(path)
    text = writing.read_text(path)
    try:
        if ending == ".json":
            return json.loads(text, object_pairs_hook=_without_repetitions)
        # tomllib's time grows as the square of a dotted key's length: hours for a key that a large file can hold.
        if any(part.count(".") > _DEEPEST_KEY for part in re.split(r"[,=\n]", text)):
            raise RecursionError
        return tomllib.loads(text)
    except RecursionError:
        raise RequestError(str(path), "nested too deeply; write plain tables") from None
    except ValueError as error:
        raise RequestError(str(path), f"not {ending[1:].upper()}: {error}; mend it there") from None


def write_config(path: str | Path, content: Mapping[str, object], *, force: bool = False) -> None:
    """Write plain dicts and lists into a .toml or .json file."""
    as_toml = _ending(path) == ".toml"
    text = toml_text(content) if as_toml else msgspec.json.format(msgspec.json.encode(content)).decode() + "\n"
    writing.write_file(path, [text], force=force)


def toml_text(content: Mapping[str, object]) -> str:
    """Return the text of a .toml file with that content."""
    import tomli_w

    fill = functools.partial(textwrap.fill, width=116, initial_indent=_INDENT, subsequent_indent=_INDENT)
    # tomli-w writes each number of a list in a line.
    return _LONG_LIST.sub(lambda numbers: f"[\n{fill(' '.join(numbers[1].split()))}\n]", tomli_w.dumps(content))


def decode(content: object, form: type[T], subject: str, tables: tuple[type[msgspec.Struct], ...]) -> T:
    """Return plain dicts and lists as a `form`; an error names the field, and for an unknown field the nearest one."""
    try:
        return _convert(content, form)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).rpartition(" - at ")
        if not problem:
            problem, place = place, "$"
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
            known = dict.fromkeys(name for table in tables for name in table.__struct_encode_fields__)
            problem = f"unknown field {unknown[1]!r}; {suggestion(unknown[1], known)}"
        raise RequestError(f"{subject}: {place.replace('`', '')}", _uncapitalized(problem)) from None


def _convert(content: object, form: type[T]) -> T:
    try:
        return msgspec.convert(content, form, dec_hook=lambda kind, given: kind.read(given))
    except UnicodeEncodeError:  # raised where a text is in the place of another type
        raise msgspec.ValidationError("a text in it is no Unicode (it has a surrogate); write it again") from None


def encode(table: ConfigTable) -> dict[str, object]:
    """Return the fields of a table as a file has them: quantities with units, defaults left out."""
    values = [(field, getattr(table, field.name)) for field in _fields(type(table))]
    return {field.name: _encode_field(value, field.type) for field, value in values if value != field.default}


def _encode_field(value: Any, kind: Any) -> object:
    quantity = next((k for k in (kind, *get_args(kind)) if isinstance(k, _Quantity)), None)
    if quantity is not None:
        parts = ((each, isinstance(each, units.Work)) for each in (value if isinstance(value, tuple) else [value]))
        texts = [units.quantity_text(each, "FLOP" if is_work else quantity.unit) for each, is_work in parts]
        return texts if len(texts) > 1 else texts[0]
    if isinstance(value, ConfigTable):
        return encode(value)
    if isinstance(value, tuple):
        return [_encode_field(part, None) for part in value]
    return value


def _uncapitalized(message: str) -> str:
    return message[0].lower() + message[1:]


@functools.cache
def _fields(table: type[ConfigTable]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(table)


def _ending(path: str | Path) -> str:
    ending = Path(path).suffix.lower()
    if ending not in (".toml", ".json"):
        raise RequestError(str(path), "its form is unknown; end its name in .toml or .json")
    return ending


def _without_repetitions(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return table


def preset_names(kind: str) -> list[str]:
    """Return the names of all `models`, `clusters` or `published` tables of the package, in alphabetical order."""
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
    """Return the text of a file of the package: a model's, a cluster's, or one of published rows."""
    return (files("cdpsim.presets") / kind / f"{name}.toml").read_text("utf-8")


def read_preset(option: str, given: str | Path) -> tuple[object, str]:
    """Return the content of the file of a `model` or a `cluster`, by a name in the package or a path; and its path."""
    if not is_preset(option, given):
        saved = Path(given) / "config.json"  # as Hugging Face saves a model
        path = saved if option == "model" and saved.is_file() else given
        return read_config(path), str(path)
    with as_file(files("cdpsim.presets") / f"{option}s" / f"{given}.toml") as path:
        return read_config(path), str(path)


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
