"""Requests of models of layers: recorded as their shape and options, read again, and priced on other clusters."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cdpsim import Cluster, Request, RequestError, assemble, price, simulate
from cdpsim.api import reopen
from cdpsim.model import Model
from cdpsim.model.layers import Layers
from cdpsim.presets import find_cluster
from cdpsim.runs import Run
from cdpsim.studies.breakeven import find_break_even, runner_on_clusters
from tests.helpers.every_row import every_row

SMALL = """
name = "small"
samples = 2
[layers]
layers = 8
width = 128
heads = 8
key_value_heads = 4
length = 64
vocabulary = 1000
dropout = true
[training]
optimizer = "adam"
mixed_precision = true
"""
BOX = """
name = "box"
[devices]
count = 32
memory_bandwidth = "2 TB/s"
overlap = "none"
[devices.speeds]
bf16 = "312 TFLOPS"
[devices.kernels]
products = 0.7
meet = "5 us"
[topology]
kind = "nodes"
per_node = 8
[topology.link]
bandwidth = "300 GB/s"
[topology.network]
bandwidth = "25 GB/s"
[[disorder.slow]]
device = 3
factor = 2.0
[[disorder.slow]]
device = 5
factor = 3.0
"""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tensor": 4},
    {"tensor": 4, "sequence": True, "recompute": "selective", "gradients": "fp32"},
    {"tensor": 2, "whole_boundaries": True, "micro_batch": 4, "length": 128},
    {"tensor": 4, "split_checkpoints": True, "recompute": "layer", "cuts": [2, 2, 3, 1]},
    {"tensor": 4, "slow": {9: 4.0}},
    {"tensor": 4, "sequence": True, "runtime": "torch"},
    {"runtime": "paper:weight_copies=yes"},
    {"tensor": 2, "replicas": 2, "zero": 3},
    {"tensor": 8, "stop": ["3:1 ms:2 ms"]},
    {"optimizer": "sgd", "mixed_precision": False},
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model and a cluster, as files."""
    small, box = tmp_path / "small.toml", tmp_path / "box.toml"
    small.write_text(SMALL)
    box.write_text(BOX)
    return small, box


def same(one: Any, other: Any) -> bool:
    """Whether two runs have the same tables and requests."""
    tables = all(getattr(one, table) == getattr(other, table) for table in ("tasks", "messages", "memory"))
    return isinstance(other, Run) and tables and dict(one.request) == dict(other.request)


@every_row("options", OPTIONS)
def test_a_run_of_layers_is_saved_and_read_again(
    options: dict[str, Any], files: tuple[Path, Path], tmp_path: Path
) -> None:
    """Where its files are gone; each option is in its record, whose model is ten lines and not stages of seconds."""
    model, cluster = files
    for given in (model, Model.load(model), Model.load(model).to_builtins()):
        run = simulate("1f1b", 4, m=4, steps=1, model=given, cluster=cluster, **options)
        run.save(tmp_path / "out", force=True)
        assert same(run, reopen(tmp_path / "out"))
        assert same(run, simulate(Request.load(tmp_path / "out" / "summary.json")))
        assert same(run, simulate(Request(**run.request)))
        assert same(run, simulate(Request.from_builtins(json.loads(json.dumps(run.request.to_builtins())))))
        assert run.request["model"] == Model.load(model).to_builtins()
        assert "stages" not in run.request["model"]
        assert options.keys() - {"replicas", "mixed_precision"} <= {*run.request}


def test_a_record_does_not_depend_on_a_file_that_changes_later(files: tuple[Path, Path]) -> None:
    model, cluster = files
    request = Request("1f1b", 4, model=model, cluster=cluster, tensor=2)
    model.write_text(SMALL.replace("128", "256"))
    assert request["model"]["layers"]["width"] == 128


@every_row("options", [options for options in OPTIONS if "replicas" not in options])
def test_another_cluster_gives_what_a_new_request_gives(options: dict[str, Any], files: tuple[Path, Path]) -> None:
    """As a request, and as costs of the same program."""
    model, cluster = files
    request = Request("1f1b", 4, m=4, steps=1, model=model, cluster=cluster, **options)
    program = assemble(request)
    for other in ("selene", cluster, Cluster.from_builtins({"devices": {"speed": "1 TFLOPS", "overlap": "none"}}, "x")):
        new = Request("1f1b", 4, m=4, steps=1, model=model, cluster=other, ignore_memory=True, **options)
        run = simulate(new)
        moved = request.of(request.model, other)
        assert moved.timed_model == new.timed_model
        assert simulate(moved).tasks == run.tasks
        assert simulate(request.of(model, other)).tasks == run.tasks
        if new.cluster.is_joined:  # else the program has other collectives
            costs = price(program, request.model, other)
            assert (costs.duration == price(assemble(new), new.model, new.cluster).duration).all()


def test_a_slow_rank_slows_its_group_and_no_other(files: tuple[Path, Path]) -> None:
    """Rank 9 of groups of 4 is in group 2; the cluster's file slows ranks 3 and 5, of groups 0 and 1."""
    model, cluster = files

    def lasts(**options: Any) -> tuple[list[float], Request]:
        """How long the first forward of each device takes."""
        run = simulate("1f1b", 4, m=4, steps=1, model=model, cluster=cluster, tensor=4, **options)
        first = [(run.tasks.device == device) & (run.tasks.micro_batch == 0) for device in range(4)]
        return [float((run.tasks.end - run.tasks.start)[rows][0]) for rows in first], run.request

    usual, _ = lasts(slow={0: 1.0})
    fast, _ = lasts(slow=dict.fromkeys(range(16), 1e-06))
    computed = [a - b for a, b in zip(usual, fast, strict=True)]  # beside exchanges, which no rank slows
    for given, factors, recorded in (
        ({"slow": {9: 4.0}}, (1, 1, 4, 1), ["9:4"]),
        ({"slow": {8: 2.0, 11: 3.0}}, (1, 1, 3, 1), ["8:2", "11:3"]),
        ({}, (2, 3, 1, 1), ["3:2", "5:3"]),
    ):
        slow, request = lasts(**given)
        longer = [a + (factor - 1) * own for a, factor, own in zip(usual, factors, computed, strict=True)]
        assert slow == pytest.approx(longer, rel=1e-5)
        assert request["slow"] == recorded


SHAPE = {"layers": 4, "width": 64, "heads": 8, "length": 32, "vocabulary": 100}


@every_row(
    ("fields", "problem"),
    [
        ({"gated": True}, "ffn: is missing; give the width of the gated MLP, which no rule says"),
        ({"heads": 7}, "heads: 7 do not divide the width 64; give head_width, or other heads"),
        (
            {"key_value_heads": 3},
            "key_value_heads: 3 do not divide the 8 heads, of which several share one; give a divisor of 8",
        ),
        (
            {"positions": 16},
            "positions: 16 rows are fewer than the 32 tokens of a sequence; lower length, or raise positions",
        ),
        ({"norms": 1}, "norms: 1 serves attention and MLP together; set parallel = true, or give 2 or 4"),
        (
            {"norms": 4, "parallel": True},
            "norms: 4 are before and behind each of two parts in turn; leave out parallel",
        ),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        Model.from_builtins({"layers": SHAPE | fields}, "x.toml")
    assert str(refused.value) == f"x.toml: $.layers: {problem}"
    with pytest.raises(ValueError) as refused:
        Layers(**SHAPE | fields)
    assert str(refused.value) == problem


AGAIN = "follow from [layers] (`tied`, `length`), and the file says them again; leave them out"


@every_row(
    ("more", "problem"),
    [
        ({"tokens": 64, "samples": 1}, f"tokens: {AGAIN}"),
        (
            {"tied": [{"stages": [0, 5], "parameters": 8}]},
            f"tied: {AGAIN}",
        ),
        (
            {"stages": [{"forward": 1.0, "backward": 1.0}]},
            "stages: and [layers] both say what its layers are; keep one",
        ),
    ],
)
def test_what_a_shape_says_is_not_said_again(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        Model.from_builtins({"layers": SHAPE, **more}, "x.toml")
    assert str(refused.value) == f"x.toml: $.{problem}"


def test_learned_positions_grow_with_the_length_unless_their_number_is_given() -> None:
    """2 bytes for each of the width's numbers of 32 rows more."""
    short, long = (
        Request("gpipe", 2, model={"layers": SHAPE}, length=length, cluster="selene").model for length in (32, 64)
    )
    assert long.stages[0].parameters - short.stages[0].parameters == 2 * 64 * 32
    assert long.tokens == 64
    with pytest.raises(ValueError) as refused:
        Request("gpipe", 2, model={"layers": SHAPE | {"positions": 48}}, length=64, cluster="selene")
    problem = "48 rows are fewer than the 64 tokens of a sequence; lower length, or raise positions"
    assert str(refused.value) == f"positions: {problem}"


def test_runtimes_of_layers_keep_what_is_gathered_and_copy_weights() -> None:
    """A stage of one layer keeps the inputs of attention and MLP whole, not in halves; a copy is as large as a weight.

    The layer's largest product has weights of 4 x width x width numbers, in halves, and a gathered input.
    """

    def layer(**options: Any) -> Any:
        request = Request("gpipe", 6, model={"layers": SHAPE, "samples": 2}, cluster="selene", **options)
        return request.model.stages[2]

    size = 2 * 2 * 32 * 64
    usual, torch = (layer(tensor=2, sequence=True, runtime=name) for name in ("paper", "torch"))
    assert torch.activation - usual.activation == 2 * size // 2
    assert layer(tensor=2, sequence=True, runtime="torch:keeps_gathered=no") == usual
    assert layer(tensor=2, sequence=True, runtime="paper:keeps_gathered=yes") == torch
    gathers = [
        sum(times for each, times in stage.backward.exchanges if each.op == "all-gather") for stage in (usual, torch)
    ]
    assert gathers == [4, 2]
    for tensor in (1, 2):
        plain, copied = (layer(tensor=tensor, runtime=f"paper:weight_copies={word}") for word in ("no", "yes"))
        assert copied.backward_transient - plain.backward_transient == 2 * 4 * 64 * 64 // tensor


def test_a_layer_of_llama2_7b_keeps_what_its_runtime_does() -> None:
    """A kernel keeps its input alone: of norms, their outputs, q, k, v, the core and the MLP two bytes a number.

    Operations of torch keep a norm's input in float32, what its weights multiply and a scale, the gate's function, and
    cosines and sines of each position. The input of the layer is there, which none of them reads.
    """
    h, f, tokens = 4096, 11008, 2 * 4096

    def layer(runtime: str, tensor: int = 1) -> Any:
        options: dict[str, Any] = {"tensor": tensor, "sequence": tensor > 1, "runtime": runtime, "micro_batch": 2}
        return Request("1f1b", 34, model="llama2-7b", cluster="a100-nodes", **options).model.stages[1]

    fused, angles = tokens * (2 * (8 * h + 3 * f) + 4 * 32), 4096 * 2 * 2 * 128
    apart = tokens * (2 * (4 * h + 4) + 2 * f + 2 * h)
    for runtime in ("paper", "megatron", "te", "liger", "torch"):
        assert layer(runtime).activation == fused == 1_078_984_704
    unfused = layer("transformers")
    assert unfused.activation == fused + apart + angles == 1_597_046_784  # that of a profile of transformers' layer
    assert unfused.unused_input == tokens * 2 * h
    assert layer("transformers:fused_rotary=yes").activation == fused + apart
    assert layer("megatron:fused_mlp=no").activation == fused + tokens * 2 * f
    split = layer("transformers:keeps_gathered=no", 4).activation
    assert split == (fused + apart) // 4 + angles  # norms lie as the sequence does, and heads need all angles


def test_a_notebook_shows_the_embedding_the_layers_and_the_head() -> None:
    """As rows of one table; equal layers share a row."""
    text = Model.from_builtins({"name": "x", "layers": SHAPE}, "x")._repr_html_()
    assert text.count("<tr>") == 1 + 3
    assert all(f">{name}<" in text for name in ("embedding", "layer", "head", "4"))


def test_cuts_say_with_which_layers_stages_begin_where_layers_are_stages(files: tuple[Path, Path]) -> None:
    """The embedding is with the first two layers."""
    model, cluster = files
    request = Request("1f1b", model=model, cluster=cluster, cuts=[2, 2, 3, 1], zero=3, replicas=2, tensor=2)
    assert (request.shape.layers, request.shape.n) == ((0, 3, 5, 8), 10)
    assert Request(**request).shape == request.shape
    for n, cuts, problem in (
        (2, "2,2,4", "are 3 stages, for n=2; give 2 numbers, or leave -n out"),
        (None, "2,2,3", "are 3 stages of 7 layers in all, for n=3 of 8 layers; give 3 numbers whose sum is 8"),
    ):
        with pytest.raises(ValueError) as refused:
            Request("1f1b", n, model=model, cluster=cluster, cuts=cuts)
        assert str(refused.value) == f"cuts: {problem}"


def test_a_model_that_a_request_has_grouped_is_not_given_to_another(files: tuple[Path, Path]) -> None:
    """Its record would be that of its layers, without what the request made of them."""
    model, cluster = files
    for n in (4, 10):
        request = Request("1f1b", n, model=model, cluster=cluster, tensor=2)
        with pytest.raises(ValueError) as refused:
            Request("1f1b", n, model=request.model, cluster=cluster)
        problem = "is grouped or trained already, which a record of its layers does not say"
        assert str(refused.value) == f"model: {problem}; give the model of its file, and options"
        assert request.of(request.model, "selene").model is request.model


def test_the_cluster_of_groups_is_that_of_the_request_that_made_it(files: tuple[Path, Path]) -> None:
    """An equal request's model and cluster give the same costs: its groups are not grouped again."""
    model, cluster = files
    one, other = (Request("1f1b", 4, m=4, model=model, cluster=cluster, tensor=4) for _ in range(2))
    copied = msgspec.structs.replace(other.cluster)
    costs = price(assemble(one), other.model, copied)
    assert (costs.duration == price(assemble(other), other.model, other.cluster).duration).all()
    assert dict(one.of(one.model, copied)) == dict(one)


def test_groups_of_another_cluster_are_not_grouped_again(files: tuple[Path, Path]) -> None:
    model, cluster = files
    one, other = (Request("1f1b", 4, m=4, model=model, cluster=each, tensor=4) for each in (cluster, "selene"))
    with pytest.raises(RequestError, match=r"^cluster: is of groups of ranks, of which no groups of 4 are made; "):
        one.of(one.model, other.cluster)
    assert one.of(one.model, other.machine).timed_model == one.of(one.model, "selene").timed_model


def test_a_break_even_is_of_the_links_between_groups(files: tuple[Path, Path]) -> None:
    """Of nodes of one group each: a rank's share of the network, and not the links inside."""
    model, _ = files
    request = Request("1f1b", 4, m=4, model=model, cluster="selene", tensor=8)
    found = find_break_even(runner_on_clusters(request), find_cluster("selene"))
    assert found.bandwidth == 0.9 * 25e9


def test_a_cluster_of_single_ranks_is_itself_and_not_an_equal_one() -> None:
    """Requests tell by identity whether they are asked for their own cluster, with what disturbs it."""
    one, other = (Cluster.from_builtins({"link": {"latency": "1 us"}}, "x") for _ in range(2))
    assert one.team(1) is one
    assert other.team(1) is other
    assert one.team(2) == other.team(2)


def test_a_grouped_model_of_layers_is_not_saved_as_its_shape(tmp_path: Path) -> None:
    """Its file would lose the grouping and the training."""
    model = Model.load("llama2-13b")
    model.save(tmp_path / "whole.toml")
    assert Model.load(tmp_path / "whole.toml") == model
    with pytest.raises(RequestError, match=r"^model: is grouped or trained, and .*; save the model that was given$"):
        model.grouped(4).save(tmp_path / "grouped.toml")
    assert not (tmp_path / "grouped.toml").exists()
