"""Tables of a trace: rows that are held as columns, as in a record array of numpy's."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from cdpsim.files.tables import as_html, data_frame
from cdpsim.numeric.columns import Columns, Flags, Ints

if TYPE_CHECKING:
    import pandas as pd

ROWS_SHOWN = 8  # of a table in a notebook


class TaskRow(NamedTuple):
    """A task: a forward F, a backward B, the weights' part W of one, or an update U, which is of no micro-batch: -1."""

    kind: str
    stage: int
    micro_batch: int
    step: int
    device: int
    start: int | float
    end: int | float
    version: int
    stale: int


class EstimatedTaskRow(NamedTuple):
    """A task of a run with estimates, which count as the versions in whose place they are read."""

    kind: str
    stage: int
    micro_batch: int
    step: int
    device: int
    start: int | float
    end: int | float
    version: int
    stale: int
    base: int  # of an update, the version from which it starts; else -1
    estimate: int  # whether what it reads, or makes, is an estimate


class RoundRow(NamedTuple):
    """The gradients that a device hands over at the end of a round; those of the last round enter no update."""

    round: int
    device: int
    micro_batches: int
    posted: int | float
    begun: int | float  # of the communication; -1 if there is none
    ended: int | float


class ExchangeRow(NamedTuple):
    """An exchange of the ranks of an axis, of all tasks of a kind and stage."""

    stage: int
    kind: str  # of the tasks: F, B, W or U
    axis: str
    op: str
    size: int  # bytes of the whole tensor
    sent: int  # bytes that each rank sends
    times: float  # in a step, of all groups
    seconds: float  # of one alone
    exposed: float  # of these, what its task takes longer


class MessageRow(NamedTuple):
    """A message; -1 where it is of no single stage or micro-batch, or has no root."""

    op: str
    content: str
    stage: int
    micro_batch: int
    step: int
    src: int
    dst: int | str  # of a collective, its members joined by `|`
    size: int
    start: int | float
    end: int | float
    rounds: int


class StreamedMessageRow(NamedTuple):
    """A message of a run in which some are of several stages, or go in streams."""

    op: str
    content: str
    stage: int
    micro_batch: int
    step: int
    src: int
    dst: int | str
    size: int
    start: int | float
    end: int | float
    rounds: int
    stages: int  # how many stages, from `stage` on, it carries something of
    stream: str  # gather, reduce or across; empty where it goes in none


class MemoryRow(NamedTuple):
    """The size of a category on a device from a time on."""

    device: int
    category: str
    time: int | float
    size: int


Row = TypeVar("Row", bound=NamedTuple)


def task_row(columns: Collection[str]) -> type[TaskRow]:
    """Return the kind of the rows of tasks with these columns."""
    kind: Any = EstimatedTaskRow if "estimate" in columns else TaskRow
    return kind  # type: ignore[no-any-return]


def message_row(columns: Collection[str]) -> type[MessageRow]:
    """Return the kind of the rows of messages with these columns."""
    kind: Any = StreamedMessageRow if "stream" in columns else MessageRow
    return kind  # type: ignore[no-any-return]


class Table(Generic[Row]):
    """The rows of a trace's table, held as columns.

    A name gives a column, as an attribute too; a number gives a row; a slice, a mask or a list of numbers gives a
    table. A loop goes over rows. `dict(table)` has the columns, as polars takes them.

    >>> from cdpsim import simulate
    >>> tasks = simulate("gpipe", 2, steps=1).tasks
    >>> tasks.device[:3], tasks[0].kind, len(tasks[tasks.kind == "B"])
    (array([0, 0, 1], dtype=int32), 'F', 4)
    >>> [(task.stage, task.micro_batch) for task in tasks if task.start == 1]
    [(0, 1), (1, 0)]
    """

    def __init__(self, row: type[Row], columns: "Columns | Table[Row]") -> None:
        self._row, self._columns = row, dict(columns)

    def keys(self) -> Collection[str]:
        """Return the names of the columns."""
        return self._columns.keys()

    def values(self) -> Collection[NDArray[Any]]:
        """Return the columns."""
        return self._columns.values()

    def items(self) -> Collection[tuple[str, NDArray[Any]]]:
        """Return the columns with their names."""
        return self._columns.items()

    def frame(self) -> "pd.DataFrame":
        """Return the table as a DataFrame of pandas."""
        return data_frame(self._columns)

    @overload
    def __getitem__(self, key: str) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, key: int | np.integer[Any]) -> Row: ...
    @overload
    def __getitem__(self, key: slice | Flags | Ints | list[int] | list[bool]) -> "Table[Row]": ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, int | np.integer):
            return self._row(*(np.asarray(self[name][key]).item() for name in self._row._fields))  # text is an object
        return Table(self._row, {name: column[key] for name, column in self.items()})

    def __getattr__(self, name: str) -> NDArray[Any]:
        try:
            return self.__dict__["_columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"a table of {', '.join(self.__dict__.get('_columns', ()))} has no {name}") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._columns]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, *(self[name].tolist() for name in self._row._fields))

    def __len__(self) -> int:
        return len(next(iter(self.values()), ()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return self.keys() == other.keys() and all(np.array_equal(self[name], other[name]) for name in self.keys())

    def __repr__(self) -> str:
        return f"Table({len(self)} rows of {', '.join(self.keys())})"

    def _repr_html_(self) -> str:
        rows = [[f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row] for row in self[:ROWS_SHOWN]]
        return as_html(list(self.keys()), rows, f"{len(self)} rows" * (len(self) > ROWS_SHOWN))


def exchange_table(rows: Sequence[Mapping[str, Any]]) -> Table[ExchangeRow]:
    """Return a table of rows by the names of their columns."""
    return Table(ExchangeRow, {name: np.array([row[name] for row in rows]) for name in ExchangeRow._fields})
