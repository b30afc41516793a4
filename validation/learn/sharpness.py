"""The sharpness of a loss: the largest eigenvalue of its Hessian, by power iteration with Hessian-vector products."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from cdpsim.numeric.columns import Floats

from ..training.forms import flatten, form_of, view_parts
from .data import Data
from .training import Course, starting_stages, typed

MOST_LABELS = 1024  # drawn, always the same, of data that have more: a sequence has one at each place
_SETTLED, _MOST_PRODUCTS = 1e-4, 200


def sharpness_of(course: Course, data: Data) -> Floats:
    """Return the sharpness of the mean loss of at most 1,024 labels, where the training of each seed starts."""
    of_sample = data.train.take(torch.zeros(1, dtype=torch.int64))[1].numel()
    drawn = torch.tensor(np.random.default_rng(0).permutation(data.samples)[: max(MOST_LABELS // of_sample, 1)])
    inputs, labels = typed(data.train.take(drawn), course)
    models = starting_models(course, data)
    products, start = hessian_products(models, lambda scores: data.loss(scores, labels), inputs)
    return np.array(largest_eigenvalues(products, start).tolist())


def starting_models(course: Course, data: Data) -> list[nn.Sequential]:
    """Return the network of each seed before it is trained."""
    return [nn.Sequential(*stages) for stages in starting_stages(course, data, range(course.seeds))]


def hessian_products(
    models: Sequence[nn.Module], loss: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the map of vectors, a row for each model, to their products with the Hessians; and vectors to start with.

    Models differ in their parameters alone.
    """
    names, forms = zip(*((name, form_of(own)) for name, own in models[0].named_parameters()), strict=True)
    thetas = torch.stack([flatten(model.parameters()) for model in models])

    def loss_at(theta: Tensor) -> Tensor:
        parameters = dict(zip(names, view_parts(theta, forms), strict=True))
        return loss(functional_call(models[0], parameters, (x,)))

    def product(theta: Tensor, vector: Tensor) -> Tensor:
        moved: Tensor
        (moved,) = vjp(grad(loss_at), theta)[1](vector)  # a Hessian is symmetric
        return moved

    drawn = torch.randn(thetas.shape, generator=torch.Generator().manual_seed(0), dtype=thetas.dtype)
    return lambda vectors: vmap(product)(thetas, vectors), drawn.to(thetas.device)


def largest_eigenvalues(product: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the largest eigenvalue of each of some symmetric matrices, which map rows of vectors.

    A power iteration finds the eigenvalue of the largest modulus. Where that is negative, the modulus is added to all
    eigenvalues, so that none is, and the iteration starts again.
    """
    values, moduli = _iterate(product, start, start.new_zeros(len(start)))
    shift = moduli - values
    return values if bool((shift <= _SETTLED * moduli).all()) else _iterate(product, start, shift)[0]


def _iterate(product: Callable[[Tensor], Tensor], vectors: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return each matrix's Rayleigh quotient, when it has settled, and the length of what it makes of a unit vector.

    A multiple of the vector is added to each product.
    """
    values = vectors.new_zeros(len(vectors))
    for _ in range(_MOST_PRODUCTS):
        vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
        moved, before = product(vectors), values
        values, moduli = (vectors * moved).sum(dim=1), moved.norm(dim=1)
        if bool(((values - before).abs() <= _SETTLED * moduli).all()):
            break
        vectors = moved + shift[:, None] * vectors
    return values, moduli
