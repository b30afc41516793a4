"""Profiles against torch's own tracker, real runs and hand counts; and the command."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

from cdpsim import simulate
from cdpsim.cli import main
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import Model, Recipe, Stage, Tie
from cdpsim.model.recipe import apply_recipe
from tests.validation import networks
from tests.validation.processes import HANGS
from validation.peers.runtimes import WITHOUT_BUCKETS
from validation.profile.allocations import record_allocations
from validation.profile.caching import MIB
from validation.profile.command import profile, profile_command, without_weights
from validation.profile.cuts import PARTITIONS, layer_times
from validation.profile.footprints import with_unit_times
from validation.profile.whole import KEPT, imitate_module, peak_activations, whole_step
from validation.program import serve_harness
from validation.training.forms import Form
from validation.training.models import make_architecture
from validation.training.optimizer import OPTIMIZERS
from validation.training.stages import Architecture, Draw, cross_entropy, cut, mean_square

MINIS = ["mlp", "transformer", "resnet-mini", "vit-mini", "gpt2-mini", "llama-mini"]
HEADER = ["stage", "layers", "forward", "backward", "activation", "transients", "boundary", "parameters"]
BOX = 'name = "box"\n[devices]\nspeed = "10 TFLOPS"\n[link]\nbandwidth = "10 GB/s"\n'


def architecture(model: str, batch: int = 2, dtype: torch.dtype = torch.float32, **sizes: Any) -> Architecture:
    if model not in ("mlp", "transformer"):
        pytest.importorskip("transformers")
    return without_weights(model, 3, batch=batch, dtype=dtype, **sizes)


class _Peak(MemTracker):  # type: ignore[misc, unused-ignore]
    """Torch's tracker, which by itself keeps only the peak of everything together."""

    activations = 0

    def _update_peak_stats(self, state: Any) -> None:
        for level in self._curr_mem_snap.values():
            self.activations = max(self.activations, level[_MemRefType.ACT] + level[_MemRefType.TEMP])
        super()._update_peak_stats(state)


def torchs_peak(model: Architecture) -> int:
    net, tracker = nn.Sequential(*model.layers), _Peak()
    with FakeTensorMode():
        imitate_module(net)
        data = [torch.empty(draw.form.shape, dtype=draw.form.dtype) for draw in (model.inputs, model.targets)]
        tracker.track_external(net, *data)
        with tracker:
            torch.autograd.backward(model.loss(net(data[0]), data[1]))
    return tracker.activations


def peak_of(model: Architecture) -> int:
    return whole_step(model, OPTIMIZERS["sgd"]).peak_activations


@pytest.mark.slow
@pytest.mark.parametrize(("model", "batch"), [("resnet50", 32), ("vit-b16", 32), ("gpt2", 2)])
def test_peak_is_that_of_torchs_tracker(model: str, batch: int) -> None:
    assert peak_of(architecture(model, batch)) == torchs_peak(architecture(model, batch))


@pytest.mark.parametrize("model", MINIS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_peak_is_that_of_a_real_run(model: str, dtype: torch.dtype) -> None:
    fake = peak_of(architecture(model, dtype=dtype))
    real = make_architecture(model, 3, batch=2, dtype=dtype)
    net: Any = nn.Sequential(*real.layers)
    if real.tied:
        net[-1][-1].weight = net[0].tokens.weight
    assert peak_activations(net, real.loss, real.inputs(0), real.targets(1)) == fake


# How many tensors of four bytes a number there are beside the parameters while torch updates all tensors at once: the
# gradients, the optimizer's state, and temporaries: of momentum decayed gradients, of Adam roots, of Adafactor changes.
@pytest.mark.parametrize(("optimizer", "held"), [("sgd", 1), ("momentum", 3), ("adam", 4), ("adafactor", 2)])
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_a_step_reserves_what_its_optimizer_holds(optimizer: str, held: int, mixed_precision: bool) -> None:
    """Of one matrix of 4,096 rows, 64 MiB in float32, beside less than 1 MiB of activations and the workspaces.

    In mixed precision parameters and gradients of two bytes are there, too; gradients until they are cast.
    """
    dtype = torch.bfloat16 if mixed_precision else torch.float32
    data = Draw(Form((1, 4096), dtype))
    with torch.device("meta"):
        layer = torch.nn.Linear(4096, 4096, bias=False, dtype=dtype)
    step = whole_step(
        Architecture([layer], data, data, mean_square), replace(OPTIMIZERS[optimizer], mixed_precision=mixed_precision)
    )
    held, always = 64 * (1 + held), KEPT // MIB
    most = max(32 + held, 2 * 32 + 2 * 64) if mixed_precision else held
    assert step.reserved // MIB == always + held + 2 * 32 * mixed_precision + 1  # a small segment is of 2 MiB
    assert step.allocated // MIB == always + most


def test_flops_of_a_vision_transformer_can_be_counted_by_hand() -> None:
    """Patches, twelve blocks of four square products, attention's two and the perceptron's two, and the head."""
    pytest.importorskip("transformers")
    tokens, width = 197, 768
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * 4 * width
    whole = 196 * width * (3 * 16 * 16) + 12 * block + width * 1000
    assert sum(stage.forward for stage in profile("vit-b16", batch=1).model.stages) == 2 * whole


@pytest.mark.slow
def test_flops_of_a_resnet_are_those_that_it_is_known_for() -> None:
    """4.09 G multiply-adds for an image."""
    pytest.importorskip("transformers")
    assert sum(stage.forward for stage in profile("resnet50", batch=1).model.stages) == 2 * 4_089_184_256


@pytest.mark.slow
def test_attention_counts_alike_in_either_kernel() -> None:
    """In the forward; in the backward the fused kernel computes scores again."""
    fused, eager = (
        [stage.forward for stage in profile("gpt2-mini", attention=kernel).model.stages]
        for kernel in ("sdpa", "eager")
        if pytest.importorskip("transformers")
    )
    assert fused == eager


@pytest.mark.slow
def test_optimizers_weigh_what_they_keep() -> None:
    stages = {name: profile("mlp", 2, optimizer=name).model.stages[0] for name in OPTIMIZERS}
    parameters = stages["sgd"].parameters
    assert parameters == 4 * (16 * 32 + 32 + 32 * 16 + 16)
    assert {name: stage.optimizer for name, stage in stages.items()} == {
        "sgd": 0,
        "momentum": parameters,
        "adam": 2 * parameters + 4,
        "adamw": 2 * parameters + 4,
        "adafactor": 4 * ((32 + 16) + 32 + (16 + 32) + 16) + 4,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("mlp", ["Perceptron"] * 3),
        ("gpt2-mini", ["embedding – block", "block", "block – head"]),
        ("resnet-mini", ["conv1 – conv2_x", "conv3_x – conv4_x", "conv5_x – head"]),
    ],
)
def test_stages_are_named_by_their_first_and_last_layers(model: str, names: list[str]) -> None:
    partition = None if model == "mlp" else "3,7"
    assert [stage.name for stage in profile(model, 3, partition=partition).model.stages] == names


@cache
def small_layers() -> tuple[Stage, ...]:
    """A small model's layers, which several tests look at, profiled once."""
    return profile("gpt2-mini").model.stages


@pytest.mark.slow
@pytest.mark.parametrize("partition", [*PARTITIONS, "1,2,5"])
def test_stages_are_those_of_the_cuts(partition: str) -> None:
    """For every way of cutting, the stages together are all of the layers."""
    pytest.importorskip("transformers")
    found, layers = profile("gpt2-mini", 4, partition=partition), small_layers()
    ends = [0, *found.cuts, found.layers]
    assert len(found.model.stages) == 4 == len(ends) - 1
    for stage, (begin, end) in zip(found.model.stages, pairwise(ends), strict=True):
        own = layers[begin:end]
        assert stage.parameters == sum(layer.parameters for layer in own)
        assert stage.boundary == own[-1].boundary
        # A first layer has no gradient of its input to compute, wherever it stands alone; none at all counts as one.
        assert abs(stage.forward - sum(layer.forward for layer in own)) <= 1
        assert abs(stage.backward - sum(layer.backward for layer in own)) <= 1


@pytest.mark.slow
def test_partitions_balance_what_they_say() -> None:
    """GPT-2's first layer has no FLOP and many bytes; the exact cuts of one are not those of the other."""
    pytest.importorskip("transformers")
    balanced, by_memory = (
        profile("gpt2", 4, partition=partition, optimizer="adam").model.stages for partition in ("flops", "memory")
    )

    def flops(stages: tuple[Stage, ...]) -> float:
        return max(stage.forward + stage.backward for stage in stages)

    def held(stages: tuple[Stage, ...]) -> int:
        return max(stage.activation + 2 * stage.parameters + stage.optimizer for stage in stages)

    assert flops(balanced) < flops(by_memory)
    assert held(by_memory) < held(balanced)


@pytest.mark.slow
def test_memory_of_a_stage_is_what_its_layers_were_cut_by() -> None:
    """The bytes that the partition sums equal the bytes of the stage, for layers that keep their input."""
    pytest.importorskip("transformers")
    layers, stage = profile("resnet-mini").model.stages, profile("resnet-mini", 1).model.stages[0]
    assert sum(layer.activation for layer in layers) - sum(layer.kept_output for layer in layers) == stage.activation


def test_layers_are_timed_by_themselves() -> None:
    model = make_architecture("mlp", 3, batch=2, dtype=torch.float32, width=8)
    times = layer_times(cut(model, [1, 2]))
    assert len(times) == 3
    assert all(0 < time < 10**10 for time in times)


def test_half_the_bytes_in_half_the_type() -> None:
    single, half = (profile("mlp", 2, dtype=dtype).model.stages[0] for dtype in ("float32", "bfloat16"))
    assert (single.activation, single.parameters) == (2 * half.activation, 2 * half.parameters)
    assert single.forward == half.forward


@pytest.mark.slow
def test_a_loss_in_float32_keeps_its_probabilities_in_float32() -> None:
    """Of a model in bfloat16, 2 bytes more for each logit and for the loss, and 4 for the cast while it is computed."""
    for dtype, wider in (("float32", 0), ("bfloat16", 1)):
        plain, other = (
            profile("gpt2-mini", 2, batch=3, dtype=dtype, float32_loss=wide).model for wide in (False, True)
        )
        assert plain.stages[0] == other.stages[0]
        last, wide = plain.stages[-1], other.stages[-1]
        logits = 3 * (plain.tokens or 0) * 64
        assert wide.activation - last.activation == wider * 2 * (logits + 1)
        assert wide.forward_transient - last.forward_transient == wider * 4 * logits


def test_equal_layers_are_one_table_in_the_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = profile("gpt2-mini").model
    found.save(tmp_path / "model.toml")
    assert (tmp_path / "model.toml").read_text().count("[[stages]]") == 3
    assert Model.load(tmp_path / "model.toml") == found
    assert all(isinstance(stage.forward, Work) and isinstance(stage.backward, Work) for stage in found.stages)


# Refusals


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n": 11}, "n=11: must be at least 1 and at most 10"),
        ({"partition": "flops"}, "flops makes as many stages as one asks for; give -n too"),
        ({"n": 3, "partition": "4"}, "n=3: '4' makes 2 stages; leave -n out, or give other cuts"),
        ({"n": 3, "partition": "flop"}, "did you mean 'flops'"),
        ({"dtype": "float31"}, "did you mean 'float32'"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; known are sgd, momentum, adam"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"width": 3}, "unknown size of gpt2-mini 'width'"),
    ],
)
def test_requests_that_cannot_be_served(options: dict[str, Any], problem: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(RequestError, match=problem):
        profile("gpt2-mini", **options)


def test_layers_that_do_not_run_are_refused_in_one_line() -> None:
    with pytest.raises(RequestError, match=r"mlp: its layers do not run .Storage size calculation overflowed"):
        profile("mlp", 2, width=10**11)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made on it: that would end the process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="torch finds no CUDA device here"):
        profile("mlp", 2, device="cuda")


# Tied tensors


OWN = """
import torch
from torch import nn
from tests.validation.networks import Product

def tied(batch):
    embedding, block = nn.Embedding(10, 6), nn.Linear(6, 6)
    x = torch.randint(10, (batch, 3))
    return [embedding, block, block, Product(embedding.weight)], x, x
"""


def test_parameters_of_several_layers_are_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding of 10 x 6 numbers is the output layer too, and one linear layer of 6 x 6 + 6 is there twice."""
    (tmp_path / "own_tied.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    found = profile("own_tied:tied", batch=2, optimizer="adam").model
    assert found.size("parameters").tolist() == [240, 168, 168, 240 + 48]
    rows = {tie.stages: tie for tie in found.tied}
    assert rows == {
        (0, 3): Tie(stages=(0, 3), parameters=240, optimizer=480, factored=4 * (10 + 6)),
        (1, 2): Tie(stages=(1, 2), parameters=168, optimizer=336, factored=4 * (6 + 6 + 6)),
    }
    assert [stage.recomputes for stage in found.stages] == [False, True, True, False]  # embedding and head
    halves = profile("own_tied:tied", 2, partition="2", batch=2).model
    assert all(stage.recomputes for stage in (*halves.stages, *profile("mlp", 2).model.stages))
    assert halves.size("parameters").tolist() == [240 + 168, 168 + 288]
    (tie,) = halves.tied
    assert (tie.stages, tie.parameters) == ((0, 1), 240 + 168)
    whole = profile("own_tied:tied", 1, batch=2).model
    assert (whole.size("parameters").tolist(), whole.tied) == ([240 + 168 + 48], ())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_head", "with_tied_head"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("n", [3, 1])
def test_a_tied_head_takes_what_torch_does(name: str, batch: int, n: int) -> None:
    """Of the gradient of the head's use, that of the embedding's and their sum, where the loss does not take more."""
    layers, x, _ = getattr(networks, name)(batch)
    net, record = nn.Sequential(*layers), record_allocations(torch.device("cpu"))
    with record:
        for _ in range(2):
            net.zero_grad()
            begin = record.now()
            cross_entropy(net(x), x).backward()
            end = record.now()
    model = profile(f"tests.validation.networks:{name}", batch=batch, optimizer="sgd").model.grouped(n)
    run = simulate("dp", model=with_unit_times(model), replicas=1, runtime=WITHOUT_BUCKETS)
    before = model.parameter_bytes + x.nbytes  # the record began behind these
    assert run.peaks[0, -1] - before == pytest.approx(record.peak(begin, end), rel=0.01)


def test_language_models_are_tied_as_their_configurations_say(tmp_path: Path) -> None:
    """GPT-2's and 64 x 32 of a Qwen2 that says so; a Llama's, which is silent, are not."""
    pytest.importorskip("transformers")
    assert profile("gpt2-mini", batch=1).model.tied[0].parameters == 64 * 32 * 4
    assert profile("llama-mini", batch=1).model.tied == ()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"model_type": "qwen2", "vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 16} | sizes
    for says, ties in ((True, [(0, 3)]), (False, []), (None, [])):
        own = fields | ({} if says is None else {"tie_word_embeddings": says})
        (tmp_path / "config.json").write_text(json.dumps(own))
        assert [tie.stages for tie in profile(str(tmp_path / "config.json"), batch=1).model.tied] == ties


@pytest.mark.slow
def test_mixed_precision_leaves_the_state_to_the_models_recipe() -> None:
    asked: dict[str, Any] = {"batch": 1, "optimizer": "adam", "mixed_precision": True}
    found = profile("transformer", 2, dtype="bfloat16", **asked).model
    assert found.training == Recipe(optimizer="adam", mixed_precision=True)
    assert not found.size("optimizer").any()
    assert found.name == "transformer"
    with pytest.raises(RequestError, match=r"mixed_precision: keeps the weights .* take --dtype bfloat16 or float16"):
        profile("transformer", 2, **asked)


@pytest.mark.slow
def test_a_language_model_has_tokens() -> None:
    """As many as its samples are long; numbers of other models are no tokens."""
    pytest.importorskip("transformers")
    assert profile("gpt2", 1, batch=1, length=32).model.tokens == 32
    assert profile("transformer", 1, batch=1).model.tokens is None
    assert profile("vit-b16", 1, batch=1).model.tokens is None


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mixed"), [("bfloat16", True), ("float32", False)])
def test_a_language_model_is_trained_by_adam_unless_one_says_otherwise(dtype: str, mixed: bool) -> None:
    """16 bytes a parameter (Rajbhandari et al. 2020, section 3.1): 2 + 2 + 12, or 4 + 4 + 8; GPT-2 has 124,439,808."""
    pytest.importorskip("transformers")
    found = profile("gpt2", 1, batch=1, dtype=dtype).model
    assert found.training == Recipe(optimizer="adam", mixed_precision=mixed)
    assert (found.name, found.size("optimizer").tolist()) == ("gpt2", [0])
    (held,) = apply_recipe(found).stages
    assert held.parameters + held.gradient_bytes + held.optimizer == 16 * 124_439_808
    plain = profile("gpt2", 1, batch=1, dtype=dtype, optimizer="sgd").model
    assert (plain.training, plain.size("optimizer").tolist()) == (Recipe(), [0])


@pytest.mark.slow
def test_other_models_have_no_state_unless_one_is_asked_for() -> None:
    pytest.importorskip("transformers")
    for name in ("mlp", "transformer", "vit-mini"):
        found = profile(name, 2, batch=1, dtype="bfloat16").model
        assert (found.training, found.size("optimizer").tolist()) == (Recipe(), [0, 0])


# The command


def command(*words: str) -> int:
    return serve_harness([profile_command], ["profile", *words])


@pytest.mark.slow
def test_what_the_command_writes_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, box = tmp_path / "model.toml", tmp_path / "box.toml"
    box.write_text(BOX)
    words = ("transformer", "-n", "4", "--batch", "8", "--optimizer", "adam", "--size", "width=64", "-o", str(model))
    assert command(*words) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == HEADER
    assert "peak activations of the whole model in one piece" in out
    assert Model.load(model).name == "transformer, adam"
    traces = str(tmp_path / "traces")
    assert main(["simulate", "multi-cdp", "-n", "4", "--model", str(model), "--cluster", str(box), "-o", traces]) == 0
    with pytest.raises(RequestError, match="exists"):
        command(*words)
    assert command(*words, "--force") == 0


@pytest.mark.parametrize("text", ["width", "=3", "width=", "width=0", "width=1.5", "wi dth=3"])
def test_sizes_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        command("mlp", "-n", "2", "--size", text, "-o", str(tmp_path / "model.toml"))
    assert not list(tmp_path.iterdir())


FRESH = """
import re
from pathlib import Path
from time import process_time
begin = process_time()
from validation.profile.command import profile
found = profile("llama3-8b", batch=1)
most = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text()).group(1)  # rusage has the parent's, too
print(process_time() - begin, most, len(found.model.stages))
"""


@pytest.mark.slow
def test_eight_billion_parameters_fit_anywhere() -> None:
    """In a process of its own: at most 2 GB, in ten seconds of a processor that may be much slower."""
    pytest.importorskip("transformers")
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True, timeout=HANGS)
    seconds, kilobytes, layers = run.stdout.split()
    assert int(layers) == 34
    assert int(kilobytes) < 2_000_000
    assert float(seconds) < 60
