"""The options of a case that change how its stages are trained: which of them are replayed, and why others are not."""

from collections.abc import Iterator
from dataclasses import replace

from cdpsim.request.options import DataOptions, ScheduleOptions
from cdpsim.request.sharing import read_ranks
from cdpsim.schedules import find_schedule
from cdpsim.schedules.rule import find_rule
from cdpsim.schedules.state import MOST_SPLIT, Owner

from .case import Case, LeftOut

REPLAYED = "replayed"
ON_HOSTS = ("none", "optimizer", "activations", "all")  # what is kept there in replays; parameters never are
# Options of schedules and of data ranks that no replay takes.
_SIMULATED = ("order", "counts", "ranks", "padding", "compress", "clip", "update_in")
DATA_RANKS = tuple(name for name in DataOptions.__annotations__ if name not in _SIMULATED)
OF_SCHEDULES = tuple(name for name in ScheduleOptions.__annotations__ if name not in _SIMULATED)
_TOLD = (*(name for name in DATA_RANKS if name not in ("replicas", "by_layer")), "prefetch")  # in a report's options
_OF_TRAINING = {"recompute": "none", "autocast": None, "offload": "none"}


def replayable(case: Case, *, alone: bool = True) -> Case:
    """Return a case without the options that cannot be replayed, in one process or by ranks; it says why in a line."""
    left_out = list(case.left_out)
    for option, rest, reason in _obstacles(case, alone):
        left_out.append(LeftOut(option, str(getattr(case, option)), reason))
        case = replace(case, **{option: rest})  # type: ignore[arg-type]
    optimizer = replace(case.optimizer, on_host=case.offload in ("optimizer", "all"))
    return replace(case, optimizer=optimizer, left_out=tuple(left_out))


def describe_options(case: Case) -> dict[str, str]:
    """Return which options were asked for, as `REPLAYED` or with the reason why they are not, or only in part."""
    asked = {name: case.asked[name] for name in _TOLD}
    asked |= {name: (getattr(case, name) or usual) != usual for name, usual in _OF_TRAINING.items()}
    asked["mixed_precision"] = case.optimizer.mixed_precision
    found = {name: REPLAYED for name, is_asked in asked.items() if is_asked}
    for option, _, reason in case.left_out:
        found[option] = f"{f'only {getattr(case, option)}' if option in found else 'not'} replayed, as {reason}"
    return found


def recorded_options(case: Case) -> dict[str, str | int | bool | None]:
    """Return the values of all options, as they were asked for."""
    values = {name: case.asked[name] for name in _TOLD} | {name: getattr(case, name) for name in _OF_TRAINING}
    if values["prefetch"] is None:
        zero, _, _ = read_ranks(find_schedule(case.schedule), case.asked["replicas"], case.asked)
        values["prefetch"] = int(zero == MOST_SPLIT)
    mixed = {"mixed_precision": case.optimizer.mixed_precision}
    return values | mixed | {left.option: left.value for left in case.left_out}


def _obstacles(case: Case, alone: bool) -> Iterator[tuple[str, str | None, str]]:
    """Yield options that cannot be replayed, each with the value that can, and the reason."""
    schedule = find_schedule(case.schedule)
    rule, splits = find_rule(case.options.get("rule", schedule.rule)), schedule.splits(case.shape)
    if case.recompute != "none" and splits:
        why = f"{schedule.name} splits backwards, and each of the two parts would compute the forward again"
        yield "recompute", "none", why
    elif case.recompute != "none" and rule.backward is not None:
        why = f"backwards of {schedule.name} read newer parameters, with which a forward gives other values"
        yield "recompute", "none", why
    if case.autocast is not None and rule.backward is not None:
        why = f"backwards of {schedule.name} read newer parameters, and the graph keeps casts of older ones"
        yield "autocast", None, why
    away = {"optimizer": case.offload in ("optimizer", "all"), "activations": case.offload in ("activations", "all")}
    reasons = []
    if away["activations"] and splits:
        away["activations"] = False
        reasons.append(f"{schedule.name} splits backwards, and a stash would cross four times")
    if away["optimizer"] and not alone and schedule.state.owner is not Owner.FIXED:
        away["optimizer"] = False
        reasons.append("devices update a stage in turn, and hosts of ranks do not share its optimizer state")
    if reasons:
        yield "offload", next((what for what, is_away in away.items() if is_away), "none"), "; ".join(reasons)
