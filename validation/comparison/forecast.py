"""The predicted time of a replay: from a calibration's files, or from times measured just before."""

from typing import NamedTuple

import numpy as np

from cdpsim.cluster import Cluster, Link
from cdpsim.model import Model
from cdpsim.schedules import find_schedule
from cdpsim.timing import engine
from cdpsim.timing.costs import node_costs

from ..calibrate import summaries, timings
from ..ranks.launcher import Ranks
from ..ranks.torchrun import TorchrunRanks
from ..replay.case import Case, build_training
from ..replay.plan import Plan
from ..report.schema import Task
from ..training.passes import one_thread

PROBE_SIZES = (8, 2**12, 2**16, 2**20)  # bytes of the messages that are timed
ROUNDS = 8  # micro-batches through each stage
HERE = "times taken here just before"


class Forecast(NamedTuple):
    """The basis of a prediction: stages with seconds or work, a cluster, a collective algorithm, and their source."""

    model: Model
    cluster: Cluster
    collective: str = "ring"
    source: str = HERE


class Durations(NamedTuple):
    """Seconds from the first task's start to the last one's end, and the seconds for which each device computes."""

    makespan: float
    busy: list[float]


def predict_durations(plan: Plan, forecast: Forecast, *, turns: bool) -> Durations:
    """Return the predicted durations of a replay; devices that share a process take turns."""
    program = plan.program
    forecast.cluster.require(program.devices)
    costs = node_costs(program, forecast.model, forecast.cluster, forecast.collective)
    start, end = engine.run_by_longest_paths(program, costs)
    compute = program.compute
    busy = np.bincount(program.tasks.device[:compute], costs.duration[:compute], program.devices)
    return Durations(float(busy.sum() if turns else end[:compute].max() - start[:compute].min()), busy.tolist())


def forecast_alone(case: Case) -> Forecast:
    """Time a case's stages in this process, where messages take no time."""
    with one_thread():
        times = timings.stage_times(build_training(case), case.optimizer, ROUNDS)
    return Forecast(_timed(case, summaries.summarize_tasks(times)), Cluster())


def forecast_by_ranks(case: Case, ranks: Ranks | TorchrunRanks, devices: int, *, timeout: float) -> Forecast | None:
    """Time a case's stages in as many ranks at once, and messages between two; return None without the results."""
    passes = ranks.call(timings.time_passes, case.trains, ROUNDS, devices, case.split, timeout=timeout)
    link = Link()
    if devices > 1:
        messages = ranks.call(timings.ping_pong, list(PROBE_SIZES), timeout=timeout)
        if messages is not None:
            fit = summaries.summarize_transfers(messages[0]).fit
            link = Link(latency=fit.latency_seconds, bandwidth=fit.bandwidth)
    if passes is None:
        return None
    tasks = summaries.summarize_tasks(summaries.pool_ranks(passes[:devices]))
    return Forecast(_timed(case, tasks), Cluster(link=link))


def _timed(case: Case, tasks: list[Task]) -> Model:
    return summaries.timed_model(case.profile, tasks, case.model, split=find_schedule(case.schedule).splits(case.shape))
