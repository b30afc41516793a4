"""The two parts of a backward in autograd's graph: for a stage's input, and later for its weights.

The first part walks from the output to the input. It passes the nodes at which parameters join, such as products with
weights, and keeps the gradients of their outputs. The second part starts from these nodes, and walks nothing twice.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .forms import Form


class Parts(NamedTuple):
    """The two parts of a stage's backward, and what each needs: the same for all of its passes."""

    early: frozenset[int]  # parameters, by number, whose gradients the input's part computes: they take no product
    needed: frozenset[int]  # saved tensors, by number, that operations of the weights' part use
    saved: tuple[Form, ...]  # all tensors that a forward saves, in their order


class ParameterGroup(NamedTuple):
    """Parameters that join the way from output to input at the same nodes, and the outputs of these nodes."""

    parameters: frozenset[int]
    edges: tuple[GradientEdge, ...]

    @property
    def nodes(self) -> set[Node]:
        """The nodes at which the parameters join."""
        return {edge.node for edge in self.edges}


def find_groups(output: GradientEdge, x: Tensor, parameters: Sequence[Tensor]) -> list[ParameterGroup]:
    """Return the groups of a graph's parameters in the order of a backward; none if it does not lead to the input."""
    nodes, goal = _sorted_nodes(output.node), get_gradient_edge(x).node
    numbers = {get_gradient_edge(parameter).node: k for k, parameter in enumerate(parameters)}
    leads: dict[Node, frozenset[int]] = {}  # to which parameters a node outside the way to the input leads
    joins: dict[Node, frozenset[int]] = {}  # the same, of a node on the way, directly
    outputs: dict[Node, set[int]] = {output.node: {output.output_nr}}
    for node in nodes:
        following = [(after, number) for after, number in node.next_functions if after is not None]
        for after, number in following:
            outputs.setdefault(after, set()).add(number)
        beside = [leads[after] for after, _ in following if after in leads]
        met = frozenset().union(*beside)
        if node is goal or len(beside) < len(following):
            joins[node] = met
        else:
            leads[node] = met | {numbers[node]} if node in numbers else met
    if output.node in leads:
        return []
    on_the_way = [node for node in reversed(nodes) if joins.get(node)]
    return [
        ParameterGroup(met, tuple(GradientEdge(node, number) for node in at for number in sorted(outputs[node])))
        for met, at in _merged((joins[node], node) for node in on_the_way)
    ]


def _merged(joining: Iterable[tuple[frozenset[int], Node]]) -> list[tuple[frozenset[int], list[Node]]]:
    of: dict[int, int] = {}  # parameter -> its group, by the number of the group's first node
    groups: dict[int, tuple[frozenset[int], list[Node]]] = {}
    for first, (met, node) in enumerate(joining):
        same = sorted({of[k] for k in met if k in of})
        merged = [groups.pop(k) for k in same]
        met = met.union(*(others for others, _ in merged))
        groups[min([first, *same])] = met, [*(each for _, at in merged for each in at), node]
        of |= dict.fromkeys(met, min([first, *same]))
    return [groups[k] for k in sorted(groups)]


def _sorted_nodes(root: Node) -> list[Node]:
    ordered: list[Node] = []
    seen, open_nodes = {root}, [(root, iter(root.next_functions))]
    while open_nodes:
        node, following = open_nodes[-1]
        after = next((after for after, _ in following if after is not None and after not in seen), None)
        if after is None:
            ordered.append(node)
            open_nodes.pop()
        else:
            seen.add(after)
            open_nodes.append((after, iter(after.next_functions)))
    return ordered
