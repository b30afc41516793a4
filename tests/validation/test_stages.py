"""The profile of stages against a real run of the same passes, against hand counts and torch's own counter."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import TypeVar

import msgspec
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from cdpsim.files.units import Work
from cdpsim.model import Model
from tests.validation.cases import OPTIMIZERS, every_model
from tests.validation.networks import images, tokens
from validation.profile.flops import Flops
from validation.profile.footprints import measure_stage, profile_stages, with_unit_times
from validation.training.forms import Form, zeros
from validation.training.models import Block, make_training, transformer
from validation.training.passes import Pass, backward, forward
from validation.training.stages import Architecture, Draw, Training, cut, mean_square

Made = TypeVar("Made")
NUMBERS = Draw(Form((2, 4), torch.float64))
TRAININGS = {
    "mlp": lambda: make_training("mlp", 3),
    "mlp, wide": lambda: make_training("mlp", 2, batch=7, width=50, layers=3, dtype=torch.float32),
    "mlp, one stage": lambda: make_training("mlp", 1, batch=1),
    "transformer": lambda: make_training("transformer", 3),
    "transformer, wide": lambda: make_training(
        "transformer", 2, batch=3, width=96, length=17, heads=4, layers=2, dtype=torch.float32
    ),
    "transformer, bfloat16": lambda: make_training("transformer", 2, batch=3, length=33, dtype=torch.bfloat16),
    "tokens": lambda: cut(tokens(4, batch=3, dtype=torch.float32), [1, 2]),
    "images": lambda: cut(images(3, batch=4, dtype=torch.float32), [1, 2]),
}


@pytest.mark.parametrize("build", TRAININGS.values(), ids=TRAININGS)
def test_it_equals_a_real_run(build: Callable[[], Training]) -> None:
    """All of every stage, but what convolutions take after torch's own first part."""
    training = build()
    stages = profile_stages(training, OPTIMIZERS["sgd"]).stages
    for j, stage in enumerate(stages):
        real = measure_stage(training, j, OPTIMIZERS["sgd"])
        assert msgspec.structs.replace(real, retained_weight_transient=stage.retained_weight_transient) == stage
        assert stage.has_input_part == (j > 0)


def test_a_perceptron_can_be_counted_by_hand() -> None:
    """Of 4 samples: input 16, hidden 32, output 16 and target 16 numbers, each of 8 bytes.

    The forward makes each layer's sum before its tanh, the hidden one while there is no output yet.
    """
    first, last = profile_stages(make_training("mlp", 2, batch=4), OPTIMIZERS["momentum"]).stages
    assert (first.activation, last.activation) == (8 * 4 * 64, 8 * 4 * 80)
    assert first.kept_output == last.kept_output == first.boundary == last.boundary == 8 * 4 * 16
    assert first.forward_transient == 8 * 4 * 16
    weights = 2 * 16 * 32
    assert first.parameters == first.optimizer == 8 * (weights + 48)
    assert first.gradients is None
    assert float(first.forward) == float(last.forward) == 2 * 4 * weights
    assert float(last.backward) == 2 * float(last.forward)
    assert float(first.backward) == 1.5 * float(first.forward)  # the first layer has no gradient of its input
    assert (first.weight_backward, last.weight_backward) == (first.backward, last.forward)
    assert (first.input_transient, first.weight_transient) == (0, first.backward_transient)


def test_each_part_of_a_backward_without_products_counts_as_one_operation() -> None:
    """But for the first stage's input, for which there is nothing to do."""
    norms = Architecture([nn.LayerNorm(4).double() for _ in range(2)], NUMBERS, NUMBERS, mean_square)
    stages = profile_stages(cut(norms, [1]), OPTIMIZERS["sgd"]).stages
    assert [(stage.backward, stage.weight_backward) for stage in stages] == [(Work(1), Work(1)), (Work(2), Work(1))]


@every_model
def test_stages_between_are_equal(model: str) -> None:
    """So a model file needs to say them once."""
    stages = profile_stages(make_training(model, 6), OPTIMIZERS["adam"]).stages
    assert len(set(stages[1:-1])) == 1
    assert stages[0].activation == stages[1].activation < stages[-1].activation


@pytest.mark.slow
def test_stages_that_only_look_alike_are_told_apart() -> None:
    """With as many parameters, of the same shapes: attention with more heads keeps more of its sums."""
    architecture = transformer(4, batch=2, dtype=torch.float32)
    layers = [*architecture.layers[:2], Block(16, 8), architecture.layers[3]]
    vars(layers[1])["note"] = ([],)  # which has no hash
    training = cut(architecture._replace(layers=layers), [1, 2, 3])
    stages = profile_stages(training, OPTIMIZERS["sgd"]).stages
    assert stages[0].parameters == stages[2].parameters
    assert stages[2].activation - stages[0].activation == 4 * 2 * (8 - 2) * 6
    assert [stage.activation for stage in stages] == [
        measure_stage(training, j, OPTIMIZERS["sgd"]).activation for j in range(4)
    ]


def test_unit_times_leave_the_bytes() -> None:
    model = profile_stages(make_training("transformer", 2), OPTIMIZERS["adam"])
    unit = with_unit_times(model)
    assert all(stage.forward == stage.backward == 1.0 and stage.weight_backward is None for stage in unit.stages)
    parts = with_unit_times(model, split=True).stages
    assert all(stage.backward == 2 * stage.forward == 2 * (stage.weight_backward or 0) == 2.0 for stage in parts)
    for name in ("activation", "kept_output", "forward_transient", "backward_transient", "boundary", "optimizer"):
        assert [getattr(stage, name) for stage in unit.stages] == [getattr(stage, name) for stage in model.stages]


def test_a_model_without_weights_is_profiled_as_one_with_them() -> None:
    with torch.device("meta"):
        light = tokens(4, batch=3, dtype=torch.float32)
    heavy = tokens(4, batch=3, dtype=torch.float32)
    models: list[Model] = [
        profile_stages(cut(architecture, [1, 3]), OPTIMIZERS["sgd"]) for architecture in (light, heavy)
    ]
    assert models[0] == models[1]


@pytest.mark.parametrize("causal", [False, True])
def test_operations_of_attention_are_those_of_its_products(causal: bool) -> None:
    """The CPU's own kernel counts as many as the products that torch's counter sees where it is switched off."""
    query, key, value = (torch.randn(2, 3, 20, 8, requires_grad=True) for _ in range(3))
    with Flops() as flops, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        forward = flops.count
        y.sum().backward()
    products = 2 * 2 * 3 * 20 * 20 * 8
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        assert forward == counter.get_total_flops() == 2 * products
        y.sum().backward()
    assert flops.count == counter.get_total_flops() + products  # it forms the scores anew


@every_model
def test_operations_are_what_torchs_counter_counts(model: str) -> None:
    """Forward and backward of a whole model, without the attention that torch does not count."""
    training = make_training(model, 2)
    whole = nn.Sequential(*training.stages)
    x, target = training.data(0, 0)
    with Flops() as flops, FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        training.loss(whole(x), target, 1).backward()
    assert flops.count == counter.get_total_flops() > 0


def allocated(work: Callable[[], Made]) -> tuple[Made, int]:
    """Do something, and read how far the allocator's own counter rises above its beginning meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return made, max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("name", ["mlp", "mlp, wide", "transformer", "transformer, wide"])
def test_it_is_what_the_allocator_counts_unwatched(name: str) -> None:
    """To the byte; but where the loss is, torch makes a few single numbers for itself."""
    training = TRAININGS[name]()
    for j, stage in enumerate(profile_stages(training, OPTIMIZERS["sgd"]).stages):
        last = j == training.n - 1
        for _ in range(2):  # the first time, torch makes things that it keeps
            theta, gradient = (zeros(training.parameters(j), training.device) for _ in range(2))
            above = None if last else zeros(training.boundary(j), training.device)

            def run_forward(j: int = j, theta: Tensor = theta, last: bool = last) -> tuple[Tensor | None, Pass]:
                x = zeros(training.boundary(j - 1) if j else training.inputs.form, training.device)
                target = zeros(training.targets.form, training.device) if last else None
                return forward(training, j, theta, x, target, 1)

            (y, kept), forward_peak = allocated(run_forward)
            del y
            _, backward_peak = allocated(partial(backward, training, kept, theta, above, gradient))
        assert abs(forward_peak - stage.activation - stage.forward_transient) <= 64 * last
        assert abs(backward_peak - stage.backward_transient) <= 64 * last
