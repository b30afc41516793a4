"""Plans: which schedule is the best for a model, a cluster, a memory and a batch, and how that is known.

>>> from cdpsim.studies.plan import plan
>>> found = plan(devices=4, batch=8, memory=6, schedules=["gpipe", "1f1b"])
>>> [(row["schedule"], row["m"], row["memory"]) for row in found.rows], found.status[:6]
([('1f1b', 8, 6)], 'proved')
"""

from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from cdpsim.cluster import Cluster
from cdpsim.errors import refuse_unknown
from cdpsim.model import UNIT_MODELS
from cdpsim.request import end_check
from cdpsim.request.options import refuse_renamed
from cdpsim.schedules import Schedule
from cdpsim.studies.plan.plan_table import Plan, plan_of
from cdpsim.studies.plan.search import Search
from cdpsim.studies.plan.space import find_candidates, refuse_without_candidates
from cdpsim.studies.plan.wanted import PLAN_OPTIONS, OneModel, read_wanted

__all__ = ["Plan", "plan"]


def plan(
    model: OneModel | Sequence[OneModel] = UNIT_MODELS[0],
    cluster: str | Path | Cluster = "unit",
    *,
    devices: int | None = None,
    batch: int | None = None,
    memory: str | float | None = None,
    schedules: str | Sequence[str | Schedule] | None = None,
    staleness: float | None = None,
    top: int = 10,
    objective: str = "samples",
    seconds: float | None = None,
    max_memory: str | float | None = None,
    fewer: bool = False,
    **options: Any,
) -> Plan:
    """Return the best ways to train a model on a number of devices, within a memory and at a batch.

    Candidates are all schedules with all sizes that have these devices and this batch, in samples of a training step or
    in micro-batches of a model that does not say how many samples these have. They are simulated in the order of lower
    bounds, until no other one can be better by the `objective`: samples, memory, devices or staleness. `memory` is what
    a device may hold, and `staleness` the most that is allowed. With `fewer`, runs may have any number of devices that
    divides `devices`. A search that `seconds` or a user ends says what it knows; `max_memory` is that of this machine.
    A value or a list for a size, a rule, a recomputation, ranks of tensors or of experts restricts what is searched; a
    list for any other option is searched, too. Several models are one network, profiled at other batches.
    """
    begun = monotonic()
    refuse_unknown("plan", options, PLAN_OPTIONS, refuse_renamed)
    limits: dict[str, Any] = {"devices": devices, "batch": batch, "memory": memory, "max_memory": max_memory}
    limits |= {"schedules": schedules, "staleness": staleness, "fewer": fewer}
    limits |= {"objective": objective, "top": top, "seconds": seconds}
    wanted = read_wanted(model, cluster, limits, options, begun)
    end_check()
    refuse_without_candidates(space := find_candidates(wanted), wanted)
    return plan_of(Search(space, wanted).run())
