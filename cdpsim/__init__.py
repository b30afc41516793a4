"""Simulate training schedules: when every task runs, what every device holds, what every link carries."""

from cdpsim import interrupts  # noqa: F401 - the first import: it says what Ctrl-C does during the others

# isort: split
from typing import TYPE_CHECKING

from cdpsim.api import assemble, price, rounds, run, simulate, sweep
from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import Slow, Stop
from cdpsim.draw.plots import figure, plot
from cdpsim.errors import RequestError, Stalled
from cdpsim.model import Model, Stage, Tie
from cdpsim.presets import clusters, models
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES, Schedule
from cdpsim.studies.compare import Measured, evaluate, evaluate_all
from cdpsim.studies.comparison import Comparison, compare
from cdpsim.studies.mesh import mesh
from cdpsim.studies.plan import Plan, plan
from cdpsim.studies.sweep import Study, study
from cdpsim.studies.table1 import table1
from cdpsim.timing.costs import Costs
from cdpsim.trace import Trace, load
from cdpsim.version import __version__

if TYPE_CHECKING:

    def schedules() -> list[str]:
        """Return the names of all schedules: the module is also a function."""
else:
    from cdpsim import schedules

__all__ = [
    "SCHEDULES",
    "Cluster",
    "Comparison",
    "Costs",
    "Measured",
    "Model",
    "Plan",
    "Program",
    "Request",
    "RequestError",
    "Run",
    "Schedule",
    "Slow",
    "Stage",
    "Stalled",
    "Stop",
    "Study",
    "Tie",
    "Trace",
    "__version__",
    "assemble",
    "clusters",
    "compare",
    "evaluate",
    "evaluate_all",
    "figure",
    "load",
    "mesh",
    "models",
    "plan",
    "plot",
    "price",
    "rounds",
    "run",
    "schedules",
    "simulate",
    "study",
    "sweep",
    "table1",
]
