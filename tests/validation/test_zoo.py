"""Models of transformers as layers, against transformers' own."""

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError
from validation.__main__ import main
from validation.profile.allocations import record_allocations
from validation.profile.command import profile, without_weights
from validation.profile.footprints import measure_stage, profile_stages
from validation.replay.case import Case, expected_parameters, largest_difference, play_in_process, prepare
from validation.training.families import RootMeanSquareNorm
from validation.training.models import ZOO, make_architecture, make_training
from validation.training.optimizer import Optimizer
from validation.training.stages import Architecture, cut

CLASSES = {
    "resnet": "ResNetForImageClassification",
    "vit": "ViTForImageClassification",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
}
MINIS = [name for name in ZOO if name.endswith("-mini")]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[nn.Module, Architecture]]:
    """Gives a model of transformers before it is taken apart, and the layers that were made of it."""

    def both(name: str, dtype: torch.dtype, **sizes: Any) -> tuple[nn.Module, Architecture]:
        kind = getattr(transformers, CLASSES[name.partition("-")[0]])
        make, copies = kind.__init__, []

        def spy(model: nn.Module, config: Any) -> None:
            make(model, config)
            copies.append(deepcopy(model))

        monkeypatch.setattr(kind, "__init__", spy)
        architecture = make_architecture(name, 1, batch=3, dtype=dtype, **sizes)
        return copies[0], architecture

    return both


@pytest.mark.parametrize("name", MINIS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_compute_what_the_model_does(whole: Callable[..., Any], name: str, attention: str) -> None:
    """Bit by bit, outputs and gradients; Llama in float32, to which its norms round in transformers."""
    llama = name == "llama-mini"
    sizes = {} if name == "resnet-mini" else {"attention": attention}
    model, architecture = whole(name, torch.float32 if llama else torch.float64, **sizes)
    layers = nn.Sequential(*architecture.layers)
    x = architecture.inputs(0)
    output = model(x, **({"use_cache": False} if x.dtype == torch.int64 else {})).logits
    found = layers(x)
    assert torch.equal(found, output)
    assert _values(layers, architecture, found) == _values(model, architecture, output)


def _values(module: nn.Module, architecture: Architecture, output: Tensor) -> list[tuple[list[float], list[float]]]:
    """Every parameter with its gradient; they have other names here and there."""
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(architecture.loss(output, architecture.targets(1)), parameters)
    return sorted((p.flatten().tolist(), g.flatten().tolist()) for p, g in zip(parameters, gradients, strict=True))


def test_llamas_norm_is_that_of_transformers_in_wider_numbers() -> None:
    """The same bits in float32; where the model is in float64, closer to the truth."""
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(8)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    ours = RootMeanSquareNorm(norm.weight, norm.variance_epsilon)
    assert torch.equal(ours(x), norm(x))
    double = RootMeanSquareNorm(nn.Parameter(norm.weight.double()), norm.variance_epsilon)(x.double())
    truth = x.double() / (x.double() ** 2).mean(-1, keepdim=True).add(norm.variance_epsilon).sqrt()
    assert (double - truth).abs().max() < 1e-15
    assert (norm(x.double()) - truth).abs().max() > 1e-9


@pytest.mark.parametrize(
    ("name", "count", "layers"),
    [
        ("resnet50", 25_557_032, 18),
        ("vit-b16", 86_567_656, 14),
        ("gpt2", 124_439_808 + 50_257 * 768, 14),  # its output layer has weights of its own
        ("llama2-7b", 6_738_415_616, 34),
        ("llama3-8b", 8_030_261_248, 34),
    ],
)
def test_full_models_have_the_parameters_that_they_are_known_for(name: str, count: int, layers: int) -> None:
    found = without_weights(name, 1, batch=1, dtype=torch.float32).layers
    assert len(found) == layers
    assert sum(parameter.numel() for layer in found for parameter in layer.parameters()) == count


@pytest.mark.parametrize("name", MINIS)
def test_small_models_make_eight_stages_that_start_alike_everywhere(name: str) -> None:
    first, second = (make_training(name, 8, seed=3) for _ in range(2))
    other = make_training(name, 8, seed=4)
    assert first.n == 8
    for a, b in zip(first.stages, second.stages, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(first.stages[0].parameters()), next(other.stages[0].parameters()))
    assert {p.dtype for stage in first.stages for p in stage.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", MINIS)
def test_a_forward_is_the_same_one_twice(name: str) -> None:
    """No dropout, and no statistics that run along."""
    architecture = make_architecture(name, 1, batch=3, dtype=torch.float64)
    layers = nn.Sequential(*architecture.layers)
    x = architecture.inputs(0)
    assert layers.training
    assert torch.equal(layers(x), layers(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIS)
def test_stages_hold_for_real_what_their_profile_says(name: str) -> None:
    """All but what convolutions take after torch's own first part: also fused attention."""
    training = make_training(name, 4, batch=3, dtype=torch.float32)
    for j, stage in enumerate(profile_stages(training, Optimizer()).stages):
        real = measure_stage(training, j, Optimizer())
        assert msgspec.structs.replace(real, retained_weight_transient=stage.retained_weight_transient) == stage


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIS)
def test_a_replay_of_their_stages_is_the_equation(name: str) -> None:
    prepared = prepare(Case("mp-cdp", 3, steps=2, model=name))
    assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) == 0


def test_sizes_are_the_models_own() -> None:
    assert make_architecture("gpt2-mini", 1, batch=2, dtype=torch.float64, length=5).inputs.form.shape == (2, 5)
    with pytest.raises(RequestError, match="unknown size of resnet-mini 'length'; known are image"):
        make_architecture("resnet-mini", 1, batch=2, dtype=torch.float64, length=5)
    with pytest.raises(RequestError, match="unknown attention 'flash'; known are sdpa, eager"):
        make_architecture("gpt2-mini", 1, batch=2, dtype=torch.float64, attention="flash")


def test_an_unknown_model_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(RequestError, match="did you mean 'resnet50'"):
        make_training("resnet-50", 2)


def test_without_transformers_its_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequestError, match=r"^transformers: is not installed; 5\.9 or newer fits: run `pip install"):
        make_training("gpt2-mini", 2)


# A model of one's own

OWN = """
import torch
from torch import nn

def classifier(batch):
    layers = [nn.Linear(6, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))]
    return layers, torch.ones(batch, 6), torch.tensor([2] * batch)

def regression(batch):
    return [nn.Embedding(4, 2), nn.Linear(2, 1)], torch.tensor([[0, 3]] * batch), torch.ones(batch, 2, 1)

def two_things(batch):
    return [nn.Linear(2, 2)], torch.ones(batch, 2)

def no_layers(batch):
    return nn.Linear(2, 2), torch.ones(batch, 2), torch.ones(batch, 2)

def no_tensors(batch):
    return [nn.Linear(2, 2)], 1, 2

def fails(batch):
    raise KeyError("mine")

def nothing(batch):
    pass

def language(batch):
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = embedding.weight
    tokens = torch.arange(11).repeat(batch, 1)
    return {"layers": [embedding, nn.Linear(6, 6), head], "input": tokens, "target": tokens}

def checkpointed(batch):
    return language(batch) | {"checkpointed": [1]}

def said(batch):
    layers = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False))
    return language(batch) | {"layers": layers, "tied": [(layers[0].weight, layers[2].weight)]}

def absolute(batch):
    given = dict(zip(("layers", "input", "target"), classifier(batch)))
    return given | {"loss": lambda output, target: output.abs().mean()}

def many(batch):
    return absolute(batch) | {"loss": lambda output, target: output}

def no_loss(batch):
    return [nn.Linear(2, 3)], torch.ones(batch, 2), torch.ones(batch, 2)

def misspelt(batch):
    return language(batch) | {"checkpoint": [1]}

def beyond(batch):
    return language(batch) | {"checkpointed": [3]}

def strangers(batch):
    return language(batch) | {"tied": [(nn.Parameter(torch.ones(1)),)]}

def wide(batch):
    return [nn.Linear(512, 512) for _ in range(8)], torch.ones(batch, 512), torch.ones(batch, 512)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(OWN)
    (tmp_path / "my_mistake.py").write_text("def function(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_models", raising=False)


@pytest.mark.usefixtures("folder")
def test_a_model_of_ones_own_is_found_in_the_working_folder() -> None:
    training = make_training("my_models:classifier", 2, batch=4)
    assert training.boundary(0).shape == (4, 5)
    assert training.input(0, 0).shape == (4, 6)
    assert training.target(0, 0).shape == (4,)
    assert {int(training.target(0, i).max()) for i in range(9)} <= {0, 1, 2}
    output = torch.zeros(4, 3, dtype=torch.float64)
    assert training.loss(output, training.target(0, 0), 1).item() == pytest.approx(torch.log(torch.tensor(3.0)).item())


@pytest.mark.usefixtures("folder")
def test_whole_numbers_in_real_ones_out() -> None:
    architecture = make_architecture("my_models:regression", 1, batch=4, dtype=torch.float64)
    assert (architecture.inputs.classes, architecture.targets.form.dtype) == (4, torch.float64)
    assert cut(architecture, [1]).loss(torch.ones(4, 2, 1), torch.zeros(4, 2, 1), 2).item() == 0.5


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_model:classifier", "cannot be imported .*; check its spelling and the working folder"),
        ("my_mistake:function", "cannot be imported"),
        (":classifier", "cannot be imported"),
        ("my_models:classifer", "has no function 'classifer'"),
        ("my_models:number", "has no function 'number'"),
        ("my_models:two_things", "must give three things"),
        ("my_models:fails", "fails when it is called with 4 .KeyError: 'mine'.; mend it there"),
        ("my_models:no_layers", "must give a list of torch modules first"),
        ("my_models:nothing", "must give three things"),
        ("my_models:misspelt", "did you mean 'checkpointed'"),
        ("my_models:beyond", "numbers of layers, from 0 to 2"),
        ("my_models:strangers", "groups of parameters that layers have"),
        ("my_models:no_tensors", "must give two tensors after the layers"),
    ],
)
def test_what_is_no_model_is_refused(name: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        make_training(name, 1)


@pytest.mark.usefixtures("folder")
def test_ones_own_loss() -> None:
    training = make_training("my_models:absolute", 1)
    assert training.loss(torch.tensor([-3.0, 1.0]), torch.zeros(2), 2).item() == 1.0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_loss", "an output of [4, 3] and a target of [4, 2] have no mean square; give a `loss`"),
        ("many", "its `loss` must give one real number, a mean over the samples"),
        ("nothing", "must give three things: layers, an example input, an example target; or a dict of "),
    ],
)
def test_a_model_without_a_loss_is_one_line(name: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"my_models:{name}", "-o", "out.toml"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


@pytest.mark.usefixtures("folder")
def test_a_profiled_model_of_ones_own_takes_no_memory_for_its_parameters() -> None:
    """Of eight matrices that no module has yet, one at a time has room, in which nothing has been written."""
    with record_allocations(torch.device("cpu")) as record:
        layers = without_weights("my_models:wide", 1, batch=1, dtype=torch.float32).layers
    assert all(own.is_meta and own.requires_grad for layer in layers for own in layer.parameters())
    assert 4 * 512**2 <= max(record.level) <= 1.1 * 4 * 512**2


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["language", "said"])
def test_a_tensor_of_two_layers_counts_once(name: str) -> None:
    """Whether the layers share it, or their function says so; language has Adam in mixed precision."""
    found = profile(f"my_models:{name}", batch=2, dtype="bfloat16").model
    assert [(tie.stages, tie.parameters) for tie in found.tied] == [((0, 2), 2 * 11 * 6)]
    assert sum(stage.parameters for stage in found.stages) == 2 * (2 * 11 * 6 + 6 * 6 + 6)
    assert (found.samples, found.tokens, found.precision) == (2, 11, "bf16")
    assert (found.training.optimizer, found.training.mixed_precision) == ("adam", True)


@pytest.mark.usefixtures("folder")
def test_a_file_says_which_layers_are_checkpointed() -> None:
    """So that a run computes these again, unless it is asked otherwise; grouped layers have one answer."""
    found = profile("my_models:checkpointed", batch=2).model
    assert found.training.recompute == "layer"
    assert [stage.recomputes for stage in found.stages] == [False, True, False]
    with pytest.raises(RequestError, match="leave -n out, commands group layers"):
        profile("my_models:checkpointed", 2, batch=2)
