"""All-reduce along two binary trees at once, each for half of the payload (Sanders, Speck & Träff 2009).

Whoever is inside one tree is a leaf of the other, so that all members send as much as they receive. A half goes in
blocks, one after another up its tree and down again; a colouring of the edges keeps a member's two children, and its
two parents, from being served in the same round (their section 3: steps of colour 0 and of colour 1 alternate).
"""

from collections import defaultdict
from functools import lru_cache

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints
from cdpsim.program.collectives.rounds import Round, Rounds, make_round, reverse_rounds

MOST_MEMBERS = 1 << 12  # beyond, laying out all blocks takes longer than it is worth


def parents(k: int) -> tuple[Ints, Ints]:
    """Each member's parent in either tree, -1 for a root.

    In the first tree odd members are leaves, and a member that 2**e divides has its children 2**(e-1) away; the second
    is its mirror image for even k, and for odd k the same tree turned by one member.
    """
    member = np.arange(k)
    bit = member & -member
    above = (member ^ bit) | (bit << 1)
    first = np.where(above < k, above, member ^ bit)
    first[0] = -1
    if k % 2 == 0:
        second = k - 1 - first[::-1]
        second[-1] = -1
        return first, second
    second = np.roll(np.where(first < 0, -1, (first + 1) % k), 1)
    return first, second


def colours(trees: tuple[Ints, Ints]) -> Ints:
    """Colour 0 or 1 of the edge above each member in either tree.

    Edges to one member have different colours, and edges from one member: paths and even rings of conflicts.
    """
    k = len(trees[0])
    edges = [(tree, child) for tree in (0, 1) for child in range(k) if trees[tree][child] >= 0]
    ends = defaultdict(list)
    for tree, child in edges:
        ends["to", child].append((tree, child))
        ends["from", int(trees[tree][child])].append((tree, child))
    conflicts = defaultdict(list)
    for pair in ends.values():
        assert len(pair) <= 2, "a member has at most two children and two parents in both trees together"
        if len(pair) == 2:
            conflicts[pair[0]].append(pair[1])
            conflicts[pair[1]].append(pair[0])
    colour = np.full((2, k), -1)
    for edge in edges:
        waiting = [edge] if colour[edge] < 0 else []
        for one in waiting:
            if colour[one] < 0:
                taken = [colour[other] for other in conflicts[one] if colour[other] >= 0]
                colour[one] = 1 - taken[0] if taken else 0
                waiting += conflicts[one]
    return colour


def _depths(parent: Ints) -> Ints:
    depth, at = np.zeros(len(parent), dtype=np.int64), parent
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, parent[at], -1)
    return depth


def _broadcast(k: int, blocks: int) -> Rounds:
    """Both trees' blocks from their roots down: block b crosses an edge of colour c below depth d in step 2(d+b)+c."""
    trees = parents(k)
    colour = colours(trees)
    steps: dict[int, list[Round]] = defaultdict(list)
    for tree, parent in enumerate(trees):
        step = 2 * (_depths(parent) - 1) + colour[tree]
        for own in np.unique(step[parent >= 0]).tolist():
            child = np.flatnonzero((step == own) & (parent >= 0))
            for block in range(blocks):
                steps[own + 2 * block].append(make_round(parent[child], child, tree * blocks + block, 1))
    return [Round(*map(np.concatenate, zip(*steps[step], strict=True))) for step in sorted(steps)]


@lru_cache(maxsize=32)
def double_tree(k: int, blocks: int) -> Rounds:
    """All-reduce: up both trees and down again, every message in the first round in which its ends are free for it."""
    if k > MOST_MEMBERS:
        problem = f"is laid out for at most {MOST_MEMBERS} members, not {k}; take ring or halving-doubling"
        raise RequestError("collective double-tree", problem)
    if k == 1:
        return []
    down = _broadcast(k, blocks)
    free = np.zeros(k, dtype=np.int64)  # the first round that each member has not been in
    rounds: dict[int, list[Round]] = defaultdict(list)
    for one in [*reverse_rounds(down), *down]:
        at = np.maximum(free[one.src], free[one.dst])
        np.maximum.at(free, one.src, at + 1)
        np.maximum.at(free, one.dst, at + 1)
        for number in np.unique(at).tolist():
            rounds[number].append(Round(*(column[at == number] for column in one)))
    return [Round(*map(np.concatenate, zip(*rounds[number], strict=True))) for number in sorted(rounds)]


def sends(k: int) -> Ints:
    """Half payloads that each member sends: one to each parent, one to each child."""
    count = np.zeros(k, dtype=np.int64)
    for parent in parents(k):
        count += parent >= 0
        np.add.at(count, parent[parent >= 0], 1)
    return count
