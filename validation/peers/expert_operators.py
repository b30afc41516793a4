"""A mixture of experts of which each rank has some: rows of tokens go to them and come back, all to all.

A router weighs experts with a softmax. Each rank has tokens of its own, of which a row goes to each of their experts.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cdpsim.model.layers import Layers
from cdpsim.model.splitting import Mesh

from .split_operators import Weights, all_to_all, pair

Activated = Callable[[Tensor, Layers], Tensor]


class Uneven(Mesh):
    """Ranks whose routers choose the experts of the largest weights; else tokens go to all of them in turn."""


class Routes(NamedTuple):
    """The rows of a rank in the order of their experts: the token and the weight of each, and all ranks' counts."""

    tokens: Tensor  # one more than there are: none
    weights: Tensor
    counts: Tensor  # of this rank's rows, for each rank and each of its experts
    arriving: Tensor  # from each rank, for each of this rank's experts


def routes_of(scores: Tensor, shape: Layers, mesh: Mesh) -> Routes:
    """Return where tokens go; uneven counts are exchanged, and with a capacity all experts get as many rows."""
    experts, many = scores.shape[1], shape.top_k
    chosen = torch.arange(len(scores) * many) % experts
    if isinstance(mesh, Uneven):
        chosen = scores.detach().topk(many).indices.flatten()
    places = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=experts)
    if shape.capacity is not None:
        most = ceil(len(chosen) * shape.capacity / experts)
        of_experts = places.split(counts.tolist())
        places = torch.cat(
            [F.pad(each[:most], (0, max(0, most - len(each))), value=len(chosen)) for each in of_experts]
        )
        counts = torch.full_like(counts, most)
    tokens = places // many
    none = scores.new_zeros(1)
    weights = torch.cat((scores.flatten(), none))[tokens * experts + F.pad(chosen, (0, 1))[places]]
    counts = counts.view(mesh.expert, -1)
    arriving = counts  # even ones are the same everywhere
    if mesh.expert > 1 and shape.capacity is None and isinstance(mesh, Uneven):
        arriving = all_to_all(counts, [1] * mesh.expert, [1] * mesh.expert)
    return Routes(tokens, weights, counts, arriving)


def rearranged(rows: Tensor, counts: Tensor) -> Tensor:
    """Return rows that lie by the first dimension of their counts, by the second."""
    parts = rows.split(counts.flatten().tolist())
    return torch.cat([part for k in range(counts.shape[1]) for part in parts[k :: counts.shape[1]]])


def products_of(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Multiply each expert's rows with its weight."""
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows.split(counts), weights, strict=True)])


def mixture(y: Tensor, of: Weights, shape: Layers, mesh: Mesh, activated: Activated) -> Tensor:
    """Return the weighted sums of what tokens' experts make of them, and what the shared experts do."""
    given, scores = F.pad(y.flatten(0, 1), (0, 0, 0, 1)), F.linear(y, of["router"]).softmax(-1)  # and no token
    routes = routes_of(scores.flatten(0, 1), shape, mesh)
    sent, received = (counts.sum(1).tolist() for counts in (routes.counts, routes.arriving))
    there, back = (partial(all_to_all, sent=one, received=two) for one, two in ((sent, received), (received, sent)))
    dispatch, combine = (pair(there, back), pair(back, there)) if mesh.expert > 1 else (Tensor.clone, Tensor.clone)
    rows, of_expert = rearranged(dispatch(given[routes.tokens]), routes.arriving), routes.arriving.sum(0).tolist()
    w = activated(products_of(rows, of["expert up"], of_expert), shape)
    got = combine(rearranged(products_of(w, of["expert down"], of_expert), routes.arriving.T))
    weighted = got * routes.weights.unsqueeze(-1)
    out = torch.zeros_like(given).scatter_add(0, routes.tokens.unsqueeze(-1).expand_as(got), weighted)
    out = out[:-1].view_as(y)
    if shape.shared_ffn:
        out = out + F.linear(activated(F.linear(y, of["shared up"]), shape), of["shared down"])
    return out
