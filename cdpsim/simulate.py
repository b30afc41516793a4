"""The front door: names and files in, trace out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cdpsim import presets
from cdpsim.assemble import assemble
from cdpsim.check import check_columns
from cdpsim.cluster import Cluster
from cdpsim.collectives import COLLECTIVES
from cdpsim.columns import Ints
from cdpsim.costs import CONTENTION, Times, price, reached
from cdpsim.devices import FULL
from cdpsim.disorder import Disorder, disorder_of
from cdpsim.disturb import disturbed
from cdpsim.engine import find_engine
from cdpsim.errors import RequestError, choose
from cdpsim.expand import expand as expanded
from cdpsim.expand import origins
from cdpsim.limits import refuse_large_expansion, refuse_too_large
from cdpsim.metrics import memory
from cdpsim.model import Model, Recipe
from cdpsim.offload import timed
from cdpsim.program import Program
from cdpsim.progress import ticker
from cdpsim.recipe import apply
from cdpsim.schedules import SCHEDULES, Schedule
from cdpsim.schedules.rule import RULES, Rule, find_rule, matrix_rule
from cdpsim.stalled import refuse_stalled
from cdpsim.streams import deferred, posted, streamed
from cdpsim.trace import TABLES, Columns, Run, Trace, load

SLOT_ORDERS = ("forward-first", "backward-first")


def simulate(
    schedule: str | Schedule,
    n: int | None = None,
    *,
    m: int | None = None,
    chunks: int = 1,
    steps: int = 3,
    rule: str | Rule | None = None,
    engine: str = "auto",
    prefetch: int = 0,
    slot_order: str | None = None,
    model: str | Path | Model = "unit",
    cluster: str | Path | Cluster = "unit",
    collective: str = "recursive-doubling",
    expand: bool = False,
    contention: str = "none",
    seed: int = 0,
    run: int = 0,
    slow: Sequence[str] = (),
    jitter: str | None = None,
    link_jitter: str | None = None,
    stop: Sequence[str] = (),
    ignore_memory: bool = False,
    max_memory: str | float | None = None,
    optimizer: str | None = None,
    mixed_precision: bool | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    defer_receives: bool = False,
) -> Trace:
    """Run one schedule and return its trace; keywords as on the command line.

    `n` may be left out where the model says how many stages there are; of a model with more, n are made. How it is
    trained (`optimizer`, `mixed_precision`, `recompute`, `offload`) is what its file says, where None. `expand` runs
    every collective as the messages of its algorithm (`--expand-collectives`), and so does `contention` (fair or
    queue), by which messages share the links of their routes; `defer_receives` posts a receive of a boundary only right
    before the task that reads it. `max_memory` is what this machine may spend on the run, in bytes or as "8 GB";
    `ignore_memory` is about the simulated devices. What disturbs a run (`slow`, `jitter`, `link_jitter`, `stop`: texts
    as on the command line) is what the cluster says, where not given; `seed` and the number of the `run` decide all
    that is random in it. A run that does not end raises `errors.Stalled`.
    """
    schedule = find_schedule(schedule)
    runner = find_engine(engine, choose("contention", contention, CONTENTION))
    weighed = engine if contention == "none" else "simpy"
    steps = whole("steps", steps, at_least=1)
    prefetch = whole("prefetch", prefetch, at_least=0)
    seed, run = whole("seed", seed, at_least=0), whole("run", run, at_least=0)
    choose("collective", collective, COLLECTIVES)
    if isinstance(model, str) and model == "unit":
        n = whole("n", n, at_least=1)
        refuse_too_large(n, n, steps, weighed, max_memory)
    training = {"optimizer": optimizer, "mixed_precision": mixed_precision, "recompute": recompute}
    training |= {"offload": offload}
    model, cluster = _find_model(model, n, training), _find_cluster(cluster)
    disorder = disorder_of(
        cluster.disorder, slow=slow, jitter=jitter, link_jitter=link_jitter, stop=stop, slots=model.is_unit
    )
    cluster = msgspec.structs.replace(cluster, disorder=Disorder())
    m, chunks = whole("m", model.n if m is None else m, at_least=1), whole("chunks", chunks, at_least=1)
    refuse_too_large(model.n, m, steps, weighed, max_memory, slots=model.is_unit and cluster.is_free)
    refuse_untaken(schedule, m=m != model.n, chunks=chunks > 1, prefetch=prefetch > 0, slot_order=slot_order)
    rule = rule if isinstance(rule, Rule) else schedule.rule if rule is None else find_rule(rule)
    done = ticker(3, "simulate")
    costing = timed(model, cluster.host)
    program = assemble(
        schedule,
        costing,
        steps,
        m=m,
        rule=rule,
        prefetch=prefetch,
        forward_first=slot_order != "backward-first",
        lanes=int(cluster.lanes(1)[0]),
        speed=reached(cluster, 1, costing)[0],
    )
    cluster.require(program.devices)
    disorder.require(max(program.devices, cluster.count or 0))
    done(1)
    if defer_receives:
        program = deferred(program)
    check_columns(program)
    costs = price(program, costing, cluster, collective)
    overlaps = cluster.overlaps(program.devices)
    turn = posted(program) if set(overlaps) != {FULL} else None
    contends = contention != "none" and not cluster.is_free  # what is free takes nothing from others
    expand = expand or contends  # a collective in one piece is on no link
    if expand:
        slots = model.is_unit and cluster.is_free
        refuse_large_expansion(program, costs, weighed, max_memory, slots=slots)
        turn = turn if turn is None else turn[origins(program, costs)]
        program = expanded(program, costs)
        check_columns(program)
        costs = price(program, costing, cluster, collective, contention if contends else "none")
    if turn is not None:
        program = streamed(program, overlaps, turn)
    costs = disturbed(program, costs, disorder, seed, run)
    done(1)
    start, end = runner(program, costs)
    refuse_stalled(program, costs, start, end)
    if not ignore_memory:
        refuse_overflow(program, start, end, cluster)
    done(0)
    request = {"schedule": schedule.name, "n": model.n, "m": m, "steps": steps, "rule": _recorded(rule, model.n, m)}
    request |= {"prefetch": prefetch, "slot_order": slot_order or SLOT_ORDERS[0], "collective": collective}
    request |= {"expand_collectives": True} if expand else {}
    request |= {"defer_receives": True} if defer_receives else {}
    request |= {"contention": contention} if contention != "none" else {}
    request |= {"run": run} if run else {}
    if disorder != Disorder():
        request["disorder"] = disorder.to_builtins(slots=costs.duration.dtype.kind == "i")
    request |= {"seed": seed, "model": model.to_builtins(), "cluster": cluster.to_builtins()}
    return Trace(Run(program, costs, start, end, collective, request, _on_hosts(program, start, end, model)))


def reopen(directory: str | Path) -> Trace:
    """Load what `Trace.save` wrote, and the run behind it where its request, served again, gives the same columns.

    Files do not say who waits for whom; the run does. Columns that somebody changed, or measured, stand for themselves.
    """
    loaded = load(directory)
    try:
        again = simulate(**_asked(loaded.request), ignore_memory=True)
    except (ValueError, TypeError, KeyError, AttributeError):  # nobody has checked this request: it may be anything
        return loaded
    same = all(_equal(getattr(loaded, table), getattr(again, table)) for table in TABLES)
    return again if same else loaded


def _asked(request: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `simulate` that a recorded request stands for."""
    asked = {name: request[name] for name in ("schedule", "n", "m", "steps", "prefetch", "collective", "seed")}
    if request["slot_order"] != SLOT_ORDERS[0]:
        asked["slot_order"] = request["slot_order"]
    asked["expand"] = bool(request.get("expand_collectives", False))
    asked["defer_receives"] = bool(request.get("defer_receives", False))
    asked["contention"] = request.get("contention", "none")
    rule = request["rule"]
    asked["rule"] = RULES[rule] if isinstance(rule, str) else matrix_rule(np.array(rule, dtype=bool))
    for part, form in (("model", Model), ("cluster", Cluster)):
        asked[part] = "unit" if request[part] == "unit" else form.from_builtins(request[part], part)
    asked["run"] = request.get("run", 0)
    if "disorder" in request:
        disorder = Disorder.from_builtins(request["disorder"], "disorder")
        asked["cluster"] = msgspec.structs.replace(_find_cluster(asked["cluster"]), disorder=disorder)
    return asked


def _equal(left: Columns, right: Columns) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)


def _recorded(rule: Rule, n: int, m: int) -> object:
    """A rule as a summary says it: by its name, or by its matrix."""
    return rule.name if rule.name in RULES else rule.matrix(n, m).astype(int).tolist()


def find_schedule(schedule: str | Schedule) -> Schedule:
    """A schedule by its name, or itself."""
    if isinstance(schedule, Schedule):
        return schedule
    return SCHEDULES[choose("schedule", schedule, SCHEDULES)]


def whole(name: str, value: object, *, at_least: int) -> int:
    """A whole number, given as one or as its digits."""
    huge = isinstance(value, int) and abs(value) >= 10**18
    text = "9" * 19 if huge else str(value)
    digits = text.isascii() and text.removeprefix("-").isdigit()
    if isinstance(value, bool) or not isinstance(value, (int, str, np.integer)) or not digits:
        raise RequestError(name, f"{name}={text[:40]} must be a whole number of at least {at_least}")
    if len(text) > 18:
        raise RequestError(name, f"{name}={text[:18]}... is astronomically large; use a smaller one")
    if int(text) < at_least:
        raise RequestError(name, f"{name}={text} must be at least {at_least}")
    return int(text)


def _on_hosts(program: Program, start: Times, end: Times, model: Model) -> Ints | None:
    """What each device's host holds at most; None where nothing is offloaded."""
    sizes = [np.array([getattr(stage, name) for stage in model.stages]) for name in ("offloaded", "host_optimizer")]
    return memory.host_peaks(program, start, end, *sizes) if any(size.any() for size in sizes) else None


def refuse_overflow(program: Program, start: Times, end: Times, cluster: Cluster) -> None:
    """Refuse a run whose devices hold more than they have, by how much, where and when."""
    limit = cluster.memory_bytes(program.devices)
    if np.isinf(limit).all():
        return
    device, time, size = memory.totals(program, start, end)
    over = np.flatnonzero(size > limit[device])
    if len(over):
        first = over[np.argmin(time[over])]
        most = int(size[device == device[first]].max())
        raise RequestError(
            "memory",
            f"device {device[first]} has {limit[device[first]]:,.0f} bytes, needs more from {time[first]:g} s on and "
            f"{most:,} at its peak; take larger devices or smaller stages, or ignore the limit (--ignore-memory)",
        )


def refuse_untaken(
    schedule: Schedule, *, m: bool = False, chunks: bool = False, prefetch: bool = False, slot_order: str | None = None
) -> None:
    """Refuse an option that the schedule does not take, rather than let it do nothing."""
    if slot_order is not None:
        choose("slot-order", slot_order, SLOT_ORDERS)
    asked = {"m": m, "chunks": chunks, "prefetch": prefetch, "slot-order": slot_order is not None}
    for option, is_asked in asked.items():
        if is_asked and option not in schedule.options:
            takes = ", ".join(schedule.options) or "none of its kind"
            raise RequestError(option, f"{schedule.name} does not take this option (it takes {takes}); leave it out")


def _find_model(model: str | Path | Model, n: int | None, training: Mapping[str, object]) -> Model:
    """A model by name or file, in n stages where n is given, and trained as asked, or as it says itself."""
    asked = {name: value for name, value in training.items() if value is not None}
    if isinstance(model, str) and model == "unit":
        return apply(Model.unit(whole("n", n, at_least=1)), Recipe(**asked))  # type: ignore[arg-type]
    found = presets.find_model(model)
    recipe = msgspec.structs.replace(found.training, **asked)
    return apply(found, recipe, None if n is None else whole("n", n, at_least=1))


def _find_cluster(cluster: str | Path | Cluster) -> Cluster:
    return Cluster.unit() if isinstance(cluster, str) and cluster == "unit" else presets.find_cluster(cluster)
