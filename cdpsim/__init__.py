"""Simulate training schedules: when every task runs, what every device holds, what every link carries."""

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, Stalled
from cdpsim.model import Model, Stage, Tie
from cdpsim.schedules import SCHEDULES, Schedule
from cdpsim.simulate import simulate
from cdpsim.table1 import table1
from cdpsim.trace import Trace, load
from cdpsim.version import __version__

__all__ = [
    "SCHEDULES",
    "Cluster",
    "Model",
    "RequestError",
    "Schedule",
    "Stage",
    "Stalled",
    "Tie",
    "Trace",
    "__version__",
    "load",
    "simulate",
    "table1",
]
