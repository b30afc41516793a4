"""Parts of a transformer that ranks split among them by hand, with the operators of Megatron-LM.

Values are of samples, positions and width. A rank's parts are those of `Mesh.tensor` ranks: all of them where it is 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cdpsim.model.layers import Layers
from cdpsim.model.splitting import Mesh

Weights = dict[str, Tensor]
Biased = tuple[Tensor, Tensor | None]  # a weight and its bias

# Newer versions of torch have other names for them.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduced(partial: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum of all ranks, or their largest numbers."""
    whole = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, operation)
    return whole


def gathered(share: Tensor) -> Tensor:
    """Return the positions of all ranks."""
    parts = share.new_empty(dist.get_world_size(), *share.shape)
    GATHER(parts.flatten(0, 1), share.contiguous())
    return parts.movedim(0, 1).flatten(1, 2)


def scattered(partial: Tensor) -> Tensor:
    """Return this rank's positions of the sum of all ranks."""
    parts = partial.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0).contiguous()
    share = torch.empty_like(parts[0])
    SCATTER(share, parts.flatten(0, 1))
    return share


def all_to_all(rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """Send some rows to each rank, by default equally many, and return those that come from each."""
    found = rows.new_empty(sum(received) if received else len(rows), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent)
    return found


def pair(there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of autograd that does one in the forward, and the other in the backward."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return there(value)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return back(gradient)

    return Pair.apply


# Megatron-LM's f and its conjugate, and g and its conjugate.
enter, leave = pair(Tensor.detach, all_reduced), pair(all_reduced, Tensor.detach)
enter_sequence, leave_sequence = pair(gathered, scattered), pair(scattered, gathered)


class GatheredAgain(torch.autograd.Function):
    """Products of one input, of which a share is kept; it is gathered for the gradients of the weights, too."""

    @staticmethod
    def forward(context: Any, share: Tensor, *parts: Any) -> tuple[Tensor, ...]:
        """Gather the input, and multiply it by each of the weights, which come with their biases."""
        weights, biases = parts[::2], parts[1::2]
        context.save_for_backward(share, *weights)
        context.biased = [bias is not None for bias in biases]
        whole = gathered(share)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of share, weights and biases."""
        share, *weights = context.saved_tensors
        given = gathered(share).flatten(0, 1)
        partial = torch.stack([g @ weight for g, weight in zip(gradients, weights, strict=True)]).sum(0)
        found: list[Tensor | None] = []
        for gradient, biased in zip(gradients, context.biased, strict=True):
            rows = gradient.flatten(0, 1)
            found += [rows.T @ given, rows.sum(0) if biased else None]
        return scattered(partial), *found


def products_by_columns(value: Tensor, layers: Sequence[Biased], mesh: Mesh) -> tuple[Tensor, ...]:
    """Multiply one input, which is needed whole, with this rank's outputs of some weights."""
    if mesh.sequence and not mesh.keeps_gathered:
        products: tuple[Tensor, ...] = GatheredAgain.apply(value, *(each for layer in layers for each in layer))
        return products
    if mesh.tensor > 1:
        value = (enter_sequence if mesh.sequence else enter)(value)
    return tuple(F.linear(value, weight, bias) for weight, bias in layers)


def summed(partial: Tensor, mesh: Mesh) -> Tensor:
    """Return what ranks have of a value together, or this rank's positions of it."""
    if mesh.tensor == 1:
        return partial
    return (leave_sequence if mesh.sequence else leave)(partial)


def embedded(tokens: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
    """Return the rows of tokens, of which each rank has some."""
    if mesh.tensor == 1:
        return F.embedding(tokens, weight)
    own = tokens - dist.get_rank() * len(weight)
    others = (own < 0) | (own >= len(weight))
    found = F.embedding(own.masked_fill_(others, 0), weight)
    return summed(found.masked_fill(others.unsqueeze(-1), 0.0), mesh)


def attended(qkv: Tensor, shape: Layers, mesh: Mesh) -> Tensor:
    """Return the outputs of this rank's heads, of which groups share keys and values."""
    width = shape.sizes["d"]
    keys = max(1, shape.kv // mesh.tensor)
    group = shape.heads // mesh.tensor // keys
    parts = qkv.split((group * keys * width, keys * width, keys * width), -1)
    if shape.attention == "flash":
        q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
        return mixed.transpose(1, 2).flatten(2)
    samples, positions, _ = qkv.shape
    heads = torch.cat([part.unflatten(-1, (keys, -1, width)).permute(0, 2, 3, 1, 4) for part in parts], 2).flatten(0, 1)
    q, k, v = heads[:, :group].flatten(1, 2), heads[:, -2], heads[:, -1]
    future = torch.full((positions, positions), -torch.inf, dtype=qkv.dtype).triu(1).repeat(group, 1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=width**-0.5)
    mixed = torch.bmm(scores.softmax(-1), v).view(samples, keys, group, positions, width)
    return mixed.permute(0, 3, 1, 2, 4).flatten(2)


class SplitLoss(torch.autograd.Function):
    """The cross-entropy of logits of which each rank has some: it sums three numbers of each token."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
        """Return the loss of each token; rows of padding have no part in it."""
        own = targets - dist.get_rank() * logits.shape[-1]
        others = (own < 0) | (own >= logits.shape[-1])
        own.masked_fill_(others, 0)
        padded = logits.clone()
        padded[..., max(0, vocabulary - dist.get_rank() * logits.shape[-1]) :] = -torch.inf
        padded -= all_reduced(padded.amax(-1), dist.ReduceOp.MAX).unsqueeze(-1)
        of_target = padded.gather(-1, own.unsqueeze(-1)).squeeze(-1)
        of_target = all_reduced(of_target.masked_fill_(others, 0.0))
        total = all_reduced(padded.exp_().sum(-1))
        context.save_for_backward(padded.div_(total.unsqueeze(-1)), own, others)
        return total.log() - of_target

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits: probabilities, less one at the target."""
        probabilities, own, others = context.saved_tensors
        one = (~others).to(gradient.dtype).unsqueeze(-1)
        found = probabilities.scatter_add(-1, own.unsqueeze(-1), -one)
        return found * gradient.unsqueeze(-1), None, None


def loss_of(logits: Tensor, targets: Tensor, vocabulary: int, mesh: Mesh) -> Tensor:
    """Return the mean cross-entropy."""
    if mesh.tensor == 1:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    tokens: Tensor = SplitLoss.apply(logits, targets, vocabulary)
    return tokens.mean()
