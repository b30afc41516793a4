"""Sweeps: many requests, resumable, on one machine or many; `study` runs one, and its rows are in a folder.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as folder:
...     found = study({"n": [2, 4], "schedule": ["gpipe", "1f1b"]}, {"m": 4}, folder, workers=1)
...     [round(bubble, 3) for bubble in found.table()["bubble"]]
[0.2, 0.2, 0.429, 0.429]
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdpsim.errors import RequestError, whole_number

if TYPE_CHECKING:
    import pandas as pd

    from cdpsim.studies.sweep.results import StudyStatus

# The modules of this package are imported when a sweep is run or read: most who import cdpsim do neither.

__all__ = ["Study", "study"]


class Study:
    """A sweep in a folder: its points, and the results of those that are done."""

    def __init__(self, directory: str | Path) -> None:
        from cdpsim.studies.sweep.store import load_study

        self.directory = Path(directory)
        self.points = load_study(self.directory).count

    def __len__(self) -> int:
        return self.points

    def __repr__(self) -> str:
        return f"Study({str(self.directory)!r}, {self.points} points)"

    def status(self) -> "StudyStatus":
        """Return how many points are done, were refused, failed, and are to do."""
        from cdpsim.studies.sweep.results import study_status

        return study_status(self.directory)

    def table(self) -> dict[str, list[Any]]:
        """Return columns, in the order of points: the axes, the results, and why a point has none."""
        from cdpsim.studies.sweep.results import table_of

        return table_of(self.directory)

    def to_pandas(self) -> "pd.DataFrame":
        """Return the table as a DataFrame of pandas."""
        from cdpsim.files.tables import data_frame

        return data_frame(self.table())

    def write(self, path: str | Path, *, force: bool = False) -> None:
        """Write the table into a .csv, .jsonl or .parquet file."""
        from cdpsim.studies.sweep.results import write_table

        write_table(self.directory, path, force=force)


def study(
    axes: Mapping[str, Any],
    fixed: Mapping[str, Any] | None,
    directory: str | Path,
    *,
    what: str = "compare",
    together: Sequence[Mapping[str, Any]] = (),
    leave_out: Sequence[Mapping[str, Any]] = (),
    workers: int | None = None,
    executor: Any = None,
) -> Study:
    """Answer every combination of the axes that is to do, and return what the folder then has.

    `axes`, `fixed`, `together`, `leave_out` and `what` are those of the file of `cdpsim sweep`. `workers` are processes
    of this machine, by default one for each processor; an `executor` of concurrent.futures, or another object with its
    `submit`, takes their place. The same call after an interruption goes on.
    """
    if workers is not None:
        workers = whole_number("workers", workers, at_least=1)
        if executor is not None:
            raise RequestError("workers", "are those of this machine, and an executor has its own; leave either out")
    from cdpsim.files.config import toml_text
    from cdpsim.studies.sweep.points import lowest_form, sweep_of
    from cdpsim.studies.sweep.running import run_part
    from cdpsim.studies.sweep.store import save_study

    given = {"what": what, "fixed": fixed or {}, "axes": axes, "together": together, "leave_out": leave_out}
    content = lowest_form({name: value for name, value in given.items() if value})
    save_study(Path(directory), sweep_of(content, "study"), "sweep.toml", toml_text(content))
    run_part(directory, workers=workers, executor=executor)
    return Study(directory)
