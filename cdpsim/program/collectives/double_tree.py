"""All-reduce along two binary trees at once, each for half of the payload (Sanders, Speck & Träff 2009).

Each inner member of one tree is a leaf of the other, so that all members send as much as they receive. A half goes in
blocks, one after another up its tree and down again. A colouring of the edges keeps a member's two children, and its
two parents, from being served in the same round (their section 3: steps of colour 0 and of colour 1 alternate).
"""

from collections import defaultdict
from functools import lru_cache

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, group_starts, sort_by
from cdpsim.program.collectives import Round, RoundList, at_once, make_round, reverse_rounds

BLOCKS = 16  # of each half of the payload: every round carries one of them
MOST_MEMBERS = 1 << 12  # beyond, laying out all blocks takes longer than it is worth


def parents(k: int) -> tuple[Ints, Ints]:
    """Return each member's parent in either tree, -1 for a root.

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
    """Return colour 0 or 1 of the edge above each member in either tree, -1 for a root.

    Edges to one member have different colours, and edges from one member: paths and even rings of conflicts.
    """
    edges = [(tree, child) for tree, parent in enumerate(trees) for child in np.flatnonzero(parent >= 0).tolist()]
    meeting = defaultdict(list)  # edges to a member, and edges from one
    for tree, child in edges:
        meeting["to", child].append((tree, child))
        meeting["from", int(trees[tree][child])].append((tree, child))
    colour = np.full((2, len(trees[0])), -1)
    for edge in edges:
        waiting = [(edge, 0)]
        while waiting:
            (tree, child), new = waiting.pop()
            if colour[tree, child] < 0:
                colour[tree, child] = new
                others = meeting["to", child] + meeting["from", int(trees[tree][child])]
                waiting += [(other, 1 - new) for other in others]
    return colour


def _depths(parent: Ints) -> Ints:
    """Return how many edges lead from each member to its root."""
    depth, at = np.zeros(len(parent), dtype=np.int64), parent
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, parent[at], -1)
    return depth


def _group_rounds(numbers: list[Ints], rounds: list[Round]) -> RoundList:
    """Join messages of equal numbers into rounds, in the order of the numbers."""
    number, messages = np.concatenate(numbers), at_once(rounds)
    order = sort_by(number)
    rows = np.split(order, group_starts(number[order])[1:])
    return [Round(*(column[row] for column in messages)) for row in rows]


def _broadcast(k: int) -> RoundList:
    """Send both trees' blocks from their roots down.

    Block b crosses an edge of colour c below depth d in step 2(d+b)+c.
    """
    trees, steps, rounds = parents(k), [], []
    for tree, (parent, colour) in enumerate(zip(trees, colours(trees), strict=True)):
        child = np.flatnonzero(parent >= 0)
        step = 2 * (_depths(parent) - 1) + colour
        for block in reversed(range(BLOCKS)):
            steps.append(step[child] + 2 * block)
            rounds.append(make_round(parent[child], child, tree * BLOCKS + block, 1))
    return _group_rounds(steps, rounds)


@lru_cache(maxsize=32)
def double_tree_rounds(k: int) -> RoundList:
    """All-reduce: up both trees and down again, every message in the first round in which its ends are free for it."""
    if k > MOST_MEMBERS:
        problem = f"is laid out for at most {MOST_MEMBERS} members, not {k}; take ring or halving-doubling"
        raise RequestError("collective double-tree", problem)
    if k == 1:
        return []
    down = _broadcast(k)
    rounds, numbers = [*reverse_rounds(down), *down], []
    free = np.zeros(k, dtype=np.int64)  # the first round that each member has not been in
    for each in rounds:
        numbers.append(np.maximum(free[each.src], free[each.dst]))
        np.maximum.at(free, each.src, numbers[-1] + 1)
        np.maximum.at(free, each.dst, numbers[-1] + 1)
    return _group_rounds(numbers, rounds)
