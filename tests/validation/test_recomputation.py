"""Recomputation against torch.utils.checkpoint on fake tensors, optimizers' state against torch's, groups profiled."""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cdpsim import presets
from cdpsim.model import Model, Recipe
from cdpsim.model.recipe import apply_recipe
from validation.profile.command import profile, without_weights
from validation.profile.tracker import Tracker
from validation.profile.whole import imitate_module
from validation.training.models import make_architecture
from validation.training.stages import Loss

CASES = [("resnet-mini", "float32"), ("gpt2-mini", "float32"), ("llama-mini", "bfloat16")]


class Held(NamedTuple):
    """The bytes that a stage keeps, and the most that it needs beyond them."""

    activation: int
    forward: int
    backward: int


class WithLoss(nn.Module):
    """Layers and what comes after the last of them."""

    def __init__(self, layers: list[nn.Module], loss: Loss, target: Tensor) -> None:
        super().__init__()
        self.layers, self.loss, self.target = nn.Sequential(*layers), loss, target

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layers(x), self.target)


def torchs(name: str, dtype: str, begin: int, end: int, segments: list[tuple[int, int]], blocks: bool) -> Held:
    """Run layers on fake tensors, each segment under a checkpoint of its own; or of these only the `blocks`.

    Blocks are all layers but a head, and an embedding of tokens.
    """
    built = without_weights(name, 1, batch=2, dtype=getattr(torch, dtype))
    layers, tracker = list(built.layers), Tracker()
    net = nn.Sequential(*layers)
    with FakeTensorMode():
        imitate_module(net)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        tracker.ignore([*net.parameters(), *gradients, *net.buffers()])
        with torch.no_grad():
            x = torch.zeros(built.inputs.form.shape, dtype=built.inputs.form.dtype)
            for layer in layers[:begin]:
                x = layer(x)
            form = x
            for layer in layers[begin:end]:
                form = layer(form)
        x = torch.zeros(x.shape, dtype=x.dtype, requires_grad=begin > 0)
        target = torch.zeros(built.targets.form.shape, dtype=built.targets.form.dtype)
        last = end == len(layers)
        tracker.see([x, target] if last else [x])
        with tracker:
            y = x
            for k, (first, past) in enumerate(segments):
                own = layers[first:past]
                closing = last and k == len(segments) - 1
                run = WithLoss(own, built.loss, target) if closing else nn.Sequential(*own)
                bare = blocks and (first == len(layers) - 1 or (first == 0 and name != "resnet-mini"))
                y = run(y) if bare else checkpoint(run, y, use_reentrant=False, preserve_rng_state=False)
        peak, edge = tracker.peak, get_gradient_edge(y)
        del y
        kept = tracker.level
        above = None if last else torch.zeros(form.shape, dtype=form.dtype)
        tracker.see([] if above is None else [above])
        tracker.reset_peak()
        before = tracker.level
        with tracker:
            torch.autograd.backward(edge, above)
    return Held(kept, peak - kept, tracker.peak - before)


@cache
def layers_of(name: str, dtype: str) -> Model:
    return profile(name, batch=2, dtype=dtype).model


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "sqrt", "layer", "layer+head"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_recomputed_stages_hold_what_torch_holds(name: str, dtype: str, how: str) -> None:
    """To the byte after the forward and at its peak. In the backward, but for what is held a moment longer or shorter.

    Of a loss that is not computed again, the forward has its share in the step's beside it, 2 bytes in bfloat16. Else
    that is: the targets, which `torchs` never lets go of; a vector of gradients of parameters, and the loss's; and in
    a ResNet the gradients of a layer's and of a segment's output, which its first operation (ReLU) uses up, and which
    cdpsim holds until layer and segment are done.
    """
    model = layers_of(name, dtype)
    ends = (0, *model.cuts(3), model.n)
    for (begin, end), stage in zip(pairwise(ends), apply_recipe(model, Recipe(recompute=how), 3).stages, strict=True):
        root = next(k for k in range(1, 9) if k * k >= end - begin)
        count = {"full": 1, "sqrt": root}.get(how, end - begin)
        cuts = [begin + k * (end - begin) // count for k in range(count + 1)]
        real = torchs(name, dtype, begin, end, list(pairwise(cuts)), how == "layer")
        assert stage.activation == real.activation
        assert 0 <= stage.forward_transient - real.forward <= (2 if how == "layer" and end == model.n else 0)
        inner = max([layer.boundary for layer in model.stages[begin : end - 1]], default=0)
        more = 4 * 32 + (2 * inner if name == "resnet-mini" else 0)
        targets = model.stages[-1].data if end == model.n else 0
        assert -targets - 4 <= stage.backward_transient - real.backward <= more


CORES = [
    ("transformer", "float32", {}),
    ("gpt2-mini", "bfloat16", {}),
    ("llama-mini", "bfloat16", {"attention": "eager"}),
    ("vit-mini", "float32", {"attention": "eager"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "how"), CORES)
def test_attention_that_is_computed_again_is_what_torch_lets_go_of(
    name: str, dtype: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte after the forward, and its work; peaks are higher than torch's by at most what the core keeps."""
    plain = profile(name, batch=2, dtype=dtype, **how).model
    ours = apply_recipe(plain, Recipe(recompute="selective"))
    family: Any = nn.functional
    core = "scaled_dot_product_attention"
    if how:
        kind = name.removesuffix("-mini")
        family, core = import_module(f"transformers.models.{kind}.modeling_{kind}"), "eager_attention_forward"
    again = partial(checkpoint, getattr(family, core), use_reentrant=False, preserve_rng_state=False)
    monkeypatch.setattr(family, core, again)
    with set_checkpoint_early_stop(False):  # or the last product is left out, whose result is there
        real = profile(name, batch=2, dtype=dtype, **how).model
    assert sum(stage.attention_activation > 0 for stage in plain.stages) >= len(plain.stages) - 2
    for layer, mine, theirs in zip(plain.stages, ours.stages, real.stages, strict=True):
        assert (mine.activation, mine.backward) == (theirs.activation, theirs.backward)
        for kind in ("forward_transient", "backward_transient"):
            assert 0 <= getattr(mine, kind) - getattr(theirs, kind) <= layer.attention_activation


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("resnet-mini", 2), ("llama-mini", 2), ("vit-b16", 32)])
def test_grouped_stages_are_those_of_a_profile(name: str, batch: int) -> None:
    """To the byte; but in the last stage, whose loss lets go of its layer's input, and holds its own gradient.

    In a ResNet's, the mean over places has a gradient of one number for all of them, and is written out only between
    stages; and its first operation (ReLU) uses up the gradient of a layer's output, which cdpsim holds until the layer
    is done. A layer without products counts as one FLOP.
    """
    layers = layers_of(name, "float32") if batch == 2 else presets.model(name)
    found = profile(name, 4, batch=batch)
    assert found.cuts == layers.cuts(4)
    for j, (mine, theirs) in enumerate(zip(layers.grouped(4).stages, found.model.stages, strict=True)):
        free = [
            "forward",
            "backward",
            "weight_backward",
            "input_transient",
            "weight_transient",
            "retained_input_transient",
            "retained_weight_transient",
        ]
        free += ["forward_transient", "inference", "backward_transient"] * (j == 3)
        same = {field: getattr(theirs, field) for field in free}
        assert msgspec.structs.replace(mine, **same) == theirs
        assert 0 <= mine.forward - theirs.forward <= 1
        assert 0 <= mine.backward - theirs.backward <= 1
        assert 0 <= (mine.weight_backward or 0) - (theirs.weight_backward or 0) <= 1
        inner = max(layer.boundary for layer in layers.stages)
        assert 0 <= mine.forward_transient - theirs.forward_transient <= inner
        assert 0 <= mine.inference_bytes - theirs.inference_bytes <= inner
        more = inner if name == "resnet-mini" else 0
        for kind in ("backward_transient", "input_transient"):
            assert -4 <= getattr(mine, kind) - getattr(theirs, kind) <= more
        assert j == 0 or -4 <= (mine.retained_input_transient or 0) - (theirs.retained_input_transient or 0) <= 2 * more
        # Gradients that take no product, such as norms', are added first by the whole, and layer by layer by a group.
        assert 0 <= (mine.weight_transient or 0) - (theirs.weight_transient or 0) <= 0.1 * theirs.parameters


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adafactor"])
@pytest.mark.parametrize(("name", "dtype"), [("resnet-mini", "float32"), ("llama-mini", "bfloat16")])
def test_an_optimizer_keeps_what_torchs_keeps(name: str, dtype: str, optimizer: str) -> None:
    """All but its count of steps."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "momentum": partial(torch.optim.SGD, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }
    built = make_architecture(name, 1, batch=2, dtype=getattr(torch, dtype))
    stages = apply_recipe(layers_of(name, dtype), Recipe(optimizer=optimizer)).stages
    for layer, stage in zip(built.layers, stages, strict=True):
        parameters = list(layer.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        own = kinds[optimizer](parameters, lr=0.1)
        own.step()
        state = [entry for kept in own.state.values() for name, entry in kept.items() if name != "step"]
        assert stage.optimizer == sum(entry.nbytes for entry in state if entry is not None)
