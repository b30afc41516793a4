"""Attention over positions of which each rank has some: keys and values gathered, in a ring, or heads all to all.

A sequence is cut into two chunks for each of c ranks; rank i has chunks i and 2 c - 1 - i, so that a causal core is as
much work on each. Cores are fused: they keep an output and, of each head and token, the logarithm of a sum. Values are
of samples, positions and width, those inside a core of samples, key heads, queries of each, positions and width.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cdpsim.model.layers import RING, Layers
from cdpsim.model.splitting import Mesh

from .split_operators import all_to_all, enter_sequence, gathered, pair, scattered

Core = tuple[Tensor, Tensor]  # an output, and the logarithms of its sums


def own_positions(values: Tensor, dim: int, mesh: Mesh, rank: int) -> Tensor:
    """Return the two chunks of a sequence that a rank has."""
    if mesh.context == 1:
        return values
    chunks = values.chunk(2 * mesh.context, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def to_heads(value: Tensor) -> Tensor:
    """Return all positions of this rank's heads."""
    parts = value.unflatten(-1, (dist.get_world_size(), -1)).movedim(2, 0)
    return all_to_all(parts).movedim(0, 1).flatten(1, 2)


def to_positions(value: Tensor) -> Tensor:
    """Return all heads at this rank's positions."""
    parts = value.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)
    return all_to_all(parts).movedim(0, 2).flatten(2)


enter_heads, leave_heads = pair(to_heads, to_positions), pair(to_positions, to_heads)


def passed_on(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Send two values to the next rank in one message, and return those of the rank before."""
    rank, ranks, sent = dist.get_rank(), dist.get_world_size(), torch.stack((first, second))
    found = torch.empty_like(sent)
    for work in (dist.isend(sent, (rank + 1) % ranks), dist.irecv(found, (rank - 1) % ranks)):
        if work is not None:
            work.wait()
    return found[0], found[1]


def in_heads(value: Tensor, width: int, groups: int) -> Tensor:
    """Return a value by its heads, of which groups share keys."""
    return value.unflatten(-1, (-1, groups, width)).permute(0, 2, 3, 1, 4)


def in_positions(value: Tensor) -> Tensor:
    """Return a value of heads by its positions."""
    return value.permute(0, 3, 1, 2, 4).flatten(2)


def scores_of(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Return scaled products of queries and of the keys that they see."""
    products: Tensor = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return products.masked_fill(~seen, -torch.inf)


def block_forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Core:
    """Return what queries make of a block of keys, of which a query may see none."""
    scores = scores_of(q, k, seen)
    sums = scores.logsumexp(-1)
    lowest = torch.finfo(sums.dtype).min
    return (scores - sums.clamp_min(lowest).unsqueeze(-1)).exp() @ v, sums


def merged(first: Core, second: Core) -> Core:
    """Return what queries make of the keys of two blocks."""
    sums = torch.logaddexp(first[1], second[1])
    parts = [output * (part - sums).exp().unsqueeze(-1) for output, part in (first, second)]
    return parts[0] + parts[1], sums


def block_backward(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sums: Tensor, gradient: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values that a block gives."""
    weights = (scores_of(q, k, seen) - sums.unsqueeze(-1)).exp()
    of_scores = weights * (gradient @ v.transpose(-1, -2) - delta.unsqueeze(-1)) * q.shape[-1] ** -0.5
    of_keys, of_values = of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient
    return of_scores @ k, of_keys.sum(2, keepdim=True), of_values.sum(2, keepdim=True)


class ContextCore(torch.autograd.Function):
    """A fused core over blocks of keys: all that are given, those of a ring, or all gathered, in each pass anew."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, shape: Layers, exchange: str, whole: bool) -> Tensor:
        """Return the output by positions; `whole` says that queries are of all positions, too."""
        context.shape, context.exchange, context.whole = shape, exchange, whole
        found: Core | None = None
        queries = queries_of(q, k, shape)
        for keys, values, seen in blocks(context, k, v):
            block = block_forward(queries, *by_keys(keys, values, shape), seen)
            found = merged(found, block) if found else block
        assert found is not None
        output = in_positions(found[0]).contiguous()
        context.save_for_backward(q, k, v, output, found[1])
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values; in a ring those of keys follow their blocks."""
        q, k, v, output, sums = context.saved_tensors
        shape = context.shape
        queries, outputs, of_output = (queries_of(each, k, shape) for each in (q, output, gradient))
        delta, of_queries, own, carried = (outputs * of_output).sum(-1), torch.zeros_like(queries), None, None
        for away, (keys, values, seen) in enumerate(blocks(context, k, v)):
            known = (seen, sums, of_output, delta)
            of_q, *of_block = block_backward(queries, *by_keys(keys, values, shape), *known)
            of_queries += of_q
            of_keys, of_values = (in_positions(each) for each in of_block)
            if away == 0:
                own = of_keys, of_values
            elif carried is None:
                carried = of_keys, of_values
            else:
                before = passed_on(*carried)
                carried = before[0] + of_keys, before[1] + of_values
        assert own is not None
        if context.exchange == "gather":
            own = scattered(own[0]), scattered(own[1])
        elif carried is not None:  # at its owner's neighbour
            last = passed_on(*carried)
            own = own[0] + last[0], own[1] + last[1]
        return in_positions(of_queries), *own, None, None, None


def queries_of(value: Tensor, keys: Tensor, shape: Layers) -> Tensor:
    """Return queries, or outputs, by their heads."""
    width = shape.sizes["d"]
    return in_heads(value, width, value.shape[-1] // keys.shape[-1])


def by_keys(keys: Tensor, values: Tensor, shape: Layers) -> tuple[Tensor, Tensor]:
    """Return keys and values by their heads."""
    width = shape.sizes["d"]
    return in_heads(keys, width, 1), in_heads(values, width, 1)


def blocks(context: Any, keys: Tensor, values: Tensor) -> Any:
    """Yield blocks of keys and values, and which of them each query sees; a ring passes each block on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(context=ranks)
    of_ranks = [own_positions(torch.arange(context.shape.length), 0, mesh, each) for each in range(ranks)]
    every = torch.cat(of_ranks)
    own = every if context.whole else of_ranks[rank]
    if context.exchange != RING:
        if context.exchange == "gather":
            keys, values = gathered(keys), gathered(values)
        yield keys, values, every <= own.unsqueeze(-1)
        return
    for away in range(ranks):
        if away:
            keys, values = passed_on(keys, values)
        yield keys, values, of_ranks[(rank - away) % ranks] <= own.unsqueeze(-1)


def attended_in_context(qkv: Tensor, shape: Layers, mesh: Mesh) -> Tensor:
    """Return the outputs of all heads at this rank's positions."""
    q, k, v = qkv.split([shape.sizes[dim] for dim in "acc"], -1)
    if mesh.attention_exchange == "all-to-all":
        q, k, v = enter_heads(q), enter_heads(k), enter_heads(v)
        return leave_heads(ContextCore.apply(q, k, v, shape, "none", True))
    exchange: str = mesh.attention_exchange
    if exchange == "gather" and mesh.keeps_gathered:
        exchange, k, v = "none", enter_sequence(k), enter_sequence(v)
    output: Tensor = ContextCore.apply(q, k, v, shape, exchange, False)
    return output
