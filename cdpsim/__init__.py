"""Simulate training schedules: when every task runs, what every device holds, what every link carries."""

from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import Slow, Stop
from cdpsim.errors import RequestError, Stalled
from cdpsim.front import assemble, price, run, simulate, sweep
from cdpsim.model import Model, Stage, Tie
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES, Schedule
from cdpsim.studies.table1 import table1
from cdpsim.timing.costs import Costs
from cdpsim.trace import Trace, load
from cdpsim.version import __version__

__all__ = [
    "SCHEDULES",
    "Cluster",
    "Costs",
    "Model",
    "Program",
    "Request",
    "RequestError",
    "Run",
    "Schedule",
    "Slow",
    "Stage",
    "Stalled",
    "Stop",
    "Tie",
    "Trace",
    "__version__",
    "assemble",
    "load",
    "price",
    "run",
    "simulate",
    "sweep",
    "table1",
]
