"""Comparison of lifetimes: a program's buffers against the lives of the same contents by the replay's own policy."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import zip_longest

import numpy as np

from cdpsim.program import Category, Kind

from ..replay.contents import BEGINNING, Holding, name_of
from ..replay.plan import Plan
from ..replay.policy import Life, split_of
from ..report.schema import LifeDifference


def compare_lives(plan: Plan) -> list[LifeDifference]:
    """Return where the program holds a content longer or shorter than the policy needs it, device by device."""
    held, sizes = _program_lives(plan)
    usual: dict[tuple[Category, int], int] = {}  # bytes by category and stage; none of a state without tensors
    for (_, holding), size in sizes.items():
        usual[holding[:2]] = max(size, usual.get(holding[:2], 0))
    pairs: list[dict[tuple[int, Holding], set[Life]]] = [defaultdict(set), defaultdict(set)]
    for lives, by_content in zip((held, plan.policy.lives), pairs, strict=True):
        for life in lives:
            by_content[life.device, life.holding].add(life)
    found = []
    for key in sorted({*pairs[0], *pairs[1]}):
        ours, theirs = (sorted(each[key], key=lambda life: plan.place_of(life.begin)) for each in pairs)
        size = sizes.get(key, usual.get(key[1][:2], 0))
        apart = [[life for life in own if life not in other] for own, other in ((ours, theirs), (theirs, ours))]
        found += [_life_difference(plan, key, size, *pair) for pair in zip_longest(*apart)] if size else []
    return found


def _program_lives(plan: Plan) -> tuple[list[Life], dict[tuple[int, Holding], int]]:
    """Return the lives of a program's buffers that outlive a message or a task, and their bytes by device and content.

    Buffers of one content that follow each other are one life.
    """
    buffers, tasks = plan.program.buffers, plan.program.tasks
    ends: dict[int, list[int]] = defaultdict(list)
    for number, moment in zip(buffers.kept.tolist(), buffers.kept_until.tolist(), strict=True):
        ends[number].append(moment >> 1)
    lasting = ~np.isin(buffers.category, (Category.COMMUNICATION, Category.ACTIVATIONS))
    lasting[plan.program.stashes] = lasting[plan.program.weight_stashes] = True
    lives, sizes = [], {}
    for number in np.flatnonzero(lasting).tolist():
        columns = (buffers.category, buffers.device, buffers.stage, buffers.version, buffers.begin, buffers.end)
        category, device, stage, version, begin, end = (int(column[number]) for column in columns)
        node = begin >> 1  # -1 stays -1: the beginning
        micro_batch = int(tasks.micro_batch[node]) if category == Category.ACTIVATIONS else -1
        holding = Holding(Category(category), stage, 0 if category == Category.OPTIMIZER else version, micro_batch)
        if plan.program.shard > 1 and category != Category.ACTIVATIONS:
            holding = _with_share(plan, holding, int(buffers.size[number]), node)
        lives.append(Life(device, holding, node, max((end >> 1, *ends[number]), key=plan.place_of)))
        sizes[device, holding] = int(buffers.size[number])
    return _joined(plan, lives), sizes


def _with_share(plan: Plan, holding: Holding, size: int, begin: int) -> Holding:
    """Return which share a buffer is: of its rank, or from a forward on one of the fewer ranks that gather it again."""
    buffers, tasks = plan.program.buffers, plan.program.tasks
    same = (buffers.category == holding.category) & (buffers.stage == holding.stage)
    split = split_of(plan.program, holding.category)
    if holding.category != Category.OPTIMIZER and size == buffers.size[same].max():
        return holding
    if holding.category == Category.PARAMETERS and 0 <= begin < len(tasks) and tasks.kind[begin] == Kind.F:
        fewer = plan.policy.between.get(holding.stage, 1)
        return holding._replace(micro_batch=int(tasks.micro_batch[begin]), split=fewer)
    return holding._replace(split=split)


def _joined(plan: Plan, lives: Iterable[Life]) -> list[Life]:
    """Join lives of one content of which one begins with the node that ends the other."""
    found: list[Life] = []
    places = plan.place_of
    for life in sorted(lives, key=lambda each: (each.device, each.holding, places(each.begin), places(each.end))):
        if found and found[-1][:2] == life[:2] and found[-1].end == life.begin != BEGINNING:
            life = found.pop()._replace(end=life.end)
        found.append(life)
    return found


def _life_difference(
    plan: Plan, key: tuple[int, Holding], size: int, held: Life | None, needed: Life | None
) -> LifeDifference:
    device, holding = key
    return LifeDifference(
        device=device,
        content=name_of(holding),
        held_from=held and plan.name_of(held.begin),
        held_until=held and plan.name_of(held.end),
        needed_from=needed and plan.name_of(needed.begin),
        last_needed=needed and plan.name_of(needed.end),
        size=size,
    )
