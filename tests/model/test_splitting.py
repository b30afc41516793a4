"""The rule that splits layers over a tensor group: its exchanges by hand, published formulas, and laws."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import Cluster, Model, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.cluster.topology import Kernels, Speeds
from cdpsim.invariants import violations
from cdpsim.model import Recipe
from cdpsim.model.layers import CORE, OPERATORS, PRODUCT, Layers, Operations
from cdpsim.model.recipe import apply_recipe
from cdpsim.model.splitting import Mesh
from cdpsim.model.stage import Stage

pytestmark = pytest.mark.filterwarnings("error")

GPT = Layers(layers=2, width=64, heads=8, length=32, vocabulary=1024, attention="eager", dropout=True)
TOKENS = 2 * 32  # of two samples
STREAM = 2 * TOKENS * 64  # bytes of the values between the products
AR, AG, RS = "all-reduce", "all-gather", "reduce-scatter"


def stages_on(shape: Layers, tensor: int = 1, sequence: bool = False, **habits: Any) -> tuple[Stage, ...]:
    """Return the stages of one rank, of two samples in 16 bits."""
    return Model.of_layers(shape, Mesh(tensor, sequence, **habits), samples=2).stages


def exchanges(cost: Any) -> Counter[tuple[str, int, bool]]:
    """Return how often an exchange of an operation and of so many bytes is done, and whether beside a product."""
    assert isinstance(cost, Operations)
    found: Counter[tuple[str, int, bool]] = Counter()
    for each, times in cost.exchanges:
        found[each.op, each.size, each.beside is not None] += int(times)
    return found


# Exchanges by hand


def test_a_layer_has_megatrons_exchanges() -> None:
    """Two all-reduces forward, behind attention and MLP; two backward, beside the weights' products (f and f-bar)."""
    stage = stages_on(GPT, 4)[1]
    assert exchanges(stage.forward) == {(AR, STREAM, False): 2}
    assert exchanges(stage.backward) == {(AR, STREAM, True): 2}
    assert not exchanges(stage.weight_backward) and not stage.partial


def test_a_sequence_that_is_split_is_gathered_and_scattered() -> None:
    """Korthikanti et al. 2022, section 4.2.2: g and g-bar, and both products' inputs gathered again."""
    stage = stages_on(GPT, 4, True)[1]
    assert exchanges(stage.forward) == {(AG, STREAM, False): 2, (RS, STREAM, False): 2}
    assert exchanges(stage.backward) == {(AG, STREAM, False): 2, (RS, STREAM, True): 2, (AG, STREAM, True): 2}
    assert exchanges(stage.weight_backward) == {(AG, STREAM, True): 2}
    kept = stages_on(GPT, 4, True, keeps_gathered=True)[1]
    assert exchanges(kept.backward) == {(AG, STREAM, False): 2, (RS, STREAM, True): 2}


def test_parallel_layers_have_half_the_sums() -> None:
    """One all-reduce each way (Wang and Komatsuzaki 2021, GPT-J), where torch's modules sum by themselves."""
    shape = replace(GPT, parallel=True)
    stage, torch = stages_on(shape, 4)[1], stages_on(shape, 4, sums_apart=True)[1]
    assert exchanges(stage.forward) == {(AR, STREAM, False): 1}
    assert exchanges(stage.backward) == {(AR, STREAM, True): 1}
    assert exchanges(torch.forward) == {(AR, STREAM, False): 2}
    assert exchanges(torch.backward) == {(AR, STREAM, True): 2}
    split = stages_on(shape, 4, True)[1]
    assert exchanges(split.forward) == {(AG, STREAM, False): 1, (RS, STREAM, False): 1}
    assert exchanges(split.backward) == {(AG, STREAM, False): 1, (RS, STREAM, True): 1, (AG, STREAM, True): 1}


def test_gradients_of_copied_weights_are_summed_once_a_step() -> None:
    """Of two norms with two vectors each, and of the biases behind the row-split products."""
    assert stages_on(GPT, 4, True)[1].partial == 2 * (4 + 2) * 64
    assert stages_on(replace(GPT, norm="rms", biases=False), 4, True)[1].partial == 2 * 2 * 64
    normed = stages_on(replace(GPT, head_norms=True, norm="rms"), 4)[1]
    assert normed.partial == 2 * 2 * 8  # two vectors as wide as a head, which each rank uses for its own heads


def test_gradients_of_heads_that_several_ranks_have_are_summed_once_a_step() -> None:
    """Four ranks have two heads of keys and of values twice: each adds what its own queries give, biases included."""
    shape = replace(GPT, key_value_heads=2)
    assert [stages_on(shape, t)[1].partial for t in (1, 2, 4)] == [0, 0, 2 * 2 * 8 * (64 + 1)]


@pytest.mark.parametrize("sequence", [False, True])
def test_embedding_and_head_are_split_by_the_vocabulary(sequence: bool) -> None:
    """The words found are partial; the loss takes three sums of 4 bytes for each token."""
    first, *_, last = stages_on(GPT, 4, sequence)
    sums = {(AR, 4 * TOKENS, False): 3}
    if sequence:
        assert exchanges(first.forward) == {(RS, STREAM, False): 1}
        assert exchanges(first.backward) == {(AG, STREAM, False): 1}
        assert exchanges(last.forward) == sums | {(AG, STREAM, False): 1}
        assert exchanges(last.backward) == {(RS, STREAM, True): 1, (AG, STREAM, True): 1}
    else:
        assert exchanges(first.forward) == {(AR, STREAM, False): 1} and not exchanges(first.backward)
        assert exchanges(last.forward) == sums and exchanges(last.backward) == {(AR, STREAM, True): 1}


def test_a_boundary_lies_as_the_stream_does() -> None:
    """Copied, it is sent as shares and gathered there (SC21, section 4.1), or whole; split, it is a share."""
    assert [(stage.boundary, stage.sent) for stage in stages_on(GPT, 4)[:2]] == [(STREAM, STREAM // 4)] * 2
    whole, split = (stages_on(GPT, 4, **habit)[1] for habit in ({"whole_boundaries": True}, {"sequence": True}))
    assert (whole.boundary, whole.sent, split.boundary, split.sent) == (STREAM, None, STREAM // 4, None)


def test_the_vocabulary_is_padded_where_it_is_split() -> None:
    """To a multiple of 128 t, as Megatron-LM pads it."""
    shape = replace(GPT, vocabulary=1000)
    assert Model.of_layers(shape).parameter_bytes == 2 * shape.numbers
    assert stages_on(shape, 4)[0].tensors[0] == (1024 // 4, 64)
    assert stages_on(replace(shape, vocabulary=1025), 4)[0].tensors[0] == (1536 // 4, 64)


def test_a_tied_embedding_is_a_share() -> None:
    """2 V h / t bytes (parallel axes, closed forms)."""
    (tie,) = Model.of_layers(GPT, Mesh(8)).tied
    assert tie.parameters == 2 * 1024 * 64 // 8 and tie.factored == 2 * (1024 // 8 + 64)


def test_working_memory_of_a_layer() -> None:
    """Forward: the last sum's input and output, or the MLP's whole output, before the mask is there.

    Backward, of both products of the MLP: the gradients of input and output, and a split input that is gathered again.
    """
    copied, split = stages_on(GPT, 4)[1], stages_on(GPT, 4, True)[1]
    assert (copied.forward_transient, copied.backward_transient) == (2 * STREAM, 2 * STREAM)
    assert (split.forward_transient, split.backward_transient) == (STREAM - STREAM // 8, 3 * STREAM)
    copies = stages_on(GPT, 4, weight_copies=True)[1]
    assert copies.backward_transient == 2 * STREAM + 2 * 64 * 256 // 4


def test_working_memory_of_a_head_that_gathers_its_input() -> None:
    """The input and its norm split, the norm gathered, and logits; probabilities and targets are not there yet."""
    head = stages_on(replace(GPT, width=1024, vocabulary=512), 4, True)[-1]
    assert head.activation == TOKENS * (2 * 2 * 1024 // 4 + 4 * 512 // 4 + 8)
    peak = TOKENS * (2 * 2 * 1024 // 4 + 2 * 1024 + 2 * 512 // 4)
    assert head.forward_transient == peak - head.activation


# Formulas of Korthikanti et al. 2022


def kept(shape: Layers, samples: int, tensor: int, sequence: bool = False, recompute: str = "none") -> int:
    """Return the bytes that a layer in the middle keeps for its backward."""
    model = Model.of_layers(shape, Mesh(tensor, sequence), samples=samples)
    return int(apply_recipe(model, Recipe(recompute=recompute), model.n).stages[1].activation)


@given(
    a=st.sampled_from([8, 16, 24]),
    d=st.integers(1, 40).map(lambda each: 8 * each),
    s=st.integers(1, 50).map(lambda each: 8 * each),
    b=st.integers(1, 6),
    t=st.sampled_from([2, 4, 8]),
)
def test_kept_bytes_are_table_2(a: int, d: int, s: int, b: int, t: int) -> None:
    """All six rows, exactly."""
    h = a * d
    shape, core, linear = replace(GPT, heads=a, width=h, length=s), Fraction(5 * a * s, h), s * b * h
    assert kept(shape, b, 1) == linear * (34 + core)
    assert kept(shape, b, t) == linear * (10 + (24 + core) / t)
    assert kept(shape, b, t, True) == linear * (34 + core) / t
    assert kept(shape, b, t, False, "selective") == linear * (10 + Fraction(24, t))
    assert kept(shape, b, t, True, "selective") == linear * Fraction(34, t)
    assert kept(shape, b, t, False, "layer") == 2 * linear


FIGURE_7 = [  # heads, width; percent of tensor parallelism alone, read from bars: sequence, selective, both, full
    (64, 6144, (66.84, 49.42, 16.18, 7.64)),
    (96, 12_288, (62.04, 56.53, 18.49, 8.71)),
    (128, 20_480, (58.31, 62.04, 20.27, 9.42)),
    (160, 25_600, (58.31, 62.04, 20.27, 9.42)),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("heads", "width", "percent"), FIGURE_7)
def test_kept_bytes_are_figure_7(heads: int, width: int, percent: tuple[float, ...]) -> None:
    shape = replace(GPT, heads=heads, width=width, length=2048)
    ways = [(True, "none"), (False, "selective"), (True, "selective"), (False, "layer")]
    found = [100 * kept(shape, 1, 8, *way) / kept(shape, 1, 8) for way in ways]
    assert found == pytest.approx(percent, abs=0.2)


# Outputs of operators that are kept


def kept_by_operators(shape: Layers, operators: str, *ranks: Any) -> Stage:
    """Return a layer in the middle that keeps its input and the outputs of operators."""
    model = Model.of_layers(shape, Mesh(*ranks), samples=2)
    return apply_recipe(model, Recipe(recompute=f"selective:{operators}"), model.n).stages[1]


def test_operators_of_ranks_keep_their_shares_and_what_they_scatter() -> None:
    """Of torchtitan's list: first, third, ... product, the core, scattered sums. The last product's output is partial.

    Every value lies split over the sequence, or by heads and the MLP. Products of keys, of the core's output and of up
    are computed again, and both inputs gathered for them; nothing is scattered again.
    """
    shape = replace(GPT, attention="flash", dropout=False, biases=False, norm="rms", ffn=96, gated=True)
    usual, stage = stages_on(shape, 4, True)[1], kept_by_operators(shape, "products/2+core+scatters", 4, True)
    x, q, v, o, scattered = (STREAM // 4,) * 5
    sums, gate, partial = 4 * TOKENS * 8 // 4, 2 * TOKENS * 96 // 4, STREAM
    assert stage.activation == x + q + v + o + sums + gate + partial + 2 * scattered
    assert exchanges(stage.backward) == exchanges(usual.backward) + Counter({(AG, STREAM, False): 2})
    assert products(stage.backward) - products(usual.backward) == 2 * TOKENS * 64 * (64 + 64 + 96) / 4
    others = kept_by_operators(shape, "norms+activations", 4, True)
    assert others.activation == x + 2 * STREAM // 4 + gate
    again = exchanges(usual.forward) + exchanges(usual.backward)
    assert exchanges(others.backward) == again
    assert others.activation + others.backward_transient >= usual.activation + usual.backward_transient


# Laws


@st.composite
def shapes(draw: st.DrawFn) -> Layers:
    """A small shape that two, four and eight ranks split, key and value heads copied where they are too few."""
    heads, flag = draw(st.sampled_from([8, 16])), st.booleans()
    gated, parallel = draw(flag), draw(flag)
    return Layers(
        layers=draw(st.integers(1, 4)),
        width=draw(st.sampled_from([16, 48, 80])),
        heads=heads,
        key_value_heads=draw(st.sampled_from([None, 1, 2, 4, 8])),
        head_width=draw(st.integers(1, 5)),
        length=8 * draw(st.integers(1, 6)),
        vocabulary=1024 * draw(st.integers(1, 3)),
        ffn=8 * draw(st.integers(1, 30)),
        gated=gated,
        attention=draw(st.sampled_from(["flash", "eager"])),
        dropout=draw(flag),
        biases=draw(st.sampled_from([True, False, "qkv"])),
        norm=draw(st.sampled_from(["layer", "rms"])),
        norms=draw(st.sampled_from([None, 1, 2] if parallel else [None, 2, 4])),
        head_norms=draw(flag),
        parallel=parallel,
        tied=draw(flag),
        positions=draw(flag),
        causal=draw(flag),
    )


groups = st.sampled_from([2, 4, 8])


def numbers_of_a_layer(shape: Layers, t: int) -> tuple[int, int]:
    """Return the numbers of a layer that t ranks have together, and those that each of them has."""
    sizes, h, norm = shape.sizes, shape.width, 2 if shape.norm == "layer" else 1
    a, d, f = sizes["a"], sizes["d"], sizes["f"]
    q = a + 2 * max(shape.kv, t) * d  # a rank has at least one head of keys, and of values
    up = (1 + shape.gated) * f
    split = h * (q + a + up + f) + q * bool(shape.biases) + up * (shape.biases is True)
    norms = shape.norms or (1 if shape.parallel else 2)
    return split, norm * (norms * h + 2 * d * shape.head_norms) + 2 * h * (shape.biases is True)


@given(shapes(), groups, st.booleans())
def test_numbers_and_products_of_all_ranks_are_the_whole(shape: Layers, t: int, sequence: bool) -> None:
    """Copied parts count once for each rank."""
    first, layer, *_, last = stages_on(shape, t, sequence)
    sizes, h = shape.sizes, shape.width
    split, copied = numbers_of_a_layer(shape, t)
    assert t * layer.parameters == 2 * (split + t * copied)
    assert t * first.parameters == 2 * h * (shape.vocabulary + t * sizes["p"])
    assert t * last.parameters == 2 * h * (shape.vocabulary + t * (2 if shape.norm == "layer" else 1))
    q, up = sizes["a"] + 2 * max(shape.kv, t) * sizes["d"], (1 + shape.gated) * sizes["f"]
    weights = split - q * bool(shape.biases) - up * (shape.biases is True)
    core = 4 * TOKENS // 32 * shape.length**2 * sizes["a"]
    assert t * products(layer.forward) == 2 * 2 * shape.length * weights + core
    assert t * products(last.forward) == 2 * 2 * shape.length * h * shape.vocabulary
    assert products(first.forward) == 0
    more = core / 2 if shape.attention == "flash" else 0  # the scores again
    assert t * products(layer.backward) == 2 * t * products(layer.forward) + more


def products(cost: Any) -> float:
    return float(sum(row.flop * times for row, times in cost.rows if row.kind in (PRODUCT, CORE)))


def volume(stage: Stage) -> int:
    """Return the bytes of a stage's exchanges; an all-reduce is a scattered sum and a gather."""
    return sum(
        int(times) * size * (1 + (op == AR))
        for cost in (stage.forward, stage.backward)
        for (op, size, _), times in exchanges(cost).items()
    )


@given(shapes(), groups)
def test_a_split_sequence_sends_as_many_bytes(shape: Layers, t: int) -> None:
    """But for inputs that are gathered again: of attention, MLP and head. Two products that read one value share it."""
    stream = 2 * 2 * shape.length * shape.width
    copied, split = stages_on(shape, t), stages_on(shape, t, True)
    kept = stages_on(shape, t, True, keeps_gathered=True)
    assert [volume(stage) for stage in kept] == [volume(stage) for stage in copied]
    again = [volume(each) - volume(stage) for each, stage in zip(split, copied, strict=True)]
    read = 1 if shape.parallel and shape.norms != 2 else 2
    assert again == [0, *[read * stream] * shape.layers, stream]


@given(shapes(), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.sets(st.sampled_from(OPERATORS), min_size=2))
def test_more_operators_keep_no_less_and_compute_no_more(
    shape: Layers, t: int, sequence: bool, operators: set[str]
) -> None:
    """All that a layer has in its backward is at least what it has without; where no product is kept, all are again."""
    fewer, all_of_them = sorted(operators)[1:], sorted(operators)
    plain = stages_on(shape, t, sequence and t > 1)[1]
    one, more = (kept_by_operators(shape, "+".join(each), t, sequence and t > 1) for each in (fewer, all_of_them))
    assert plain.boundary <= one.activation <= more.activation
    assert products(plain.backward) <= products(more.backward) <= products(one.backward)
    assert one.activation + one.backward_transient >= plain.activation + plain.backward_transient
    if operators.isdisjoint(("products", "products/2", "core")):
        assert products(one.backward) == products(plain.backward) + products(plain.forward)


@given(shapes(), st.booleans())
def test_more_ranks_keep_no_more(shape: Layers, sequence: bool) -> None:
    """Of activations, weights and boundaries; a group of one splits nothing."""
    kinds = ("activation", "attention_activation", "parameters", "boundary")
    for fewer, more in pairwise(stages_on(shape, t, sequence) for t in (1, 2, 4, 8)):
        for kind, (was, now) in product(kinds, zip(fewer, more, strict=True)):
            assert getattr(now, kind) <= getattr(was, kind)


KERNELS = Kernels(products=0.5, passes=0.5, core=0.25, launch=1e-6)


def cluster(bandwidth: float, meet: float) -> Cluster:
    """Devices without a topology, whose kernels take their time."""
    kernels = replace(KERNELS, meet=meet)
    device = Devices(speeds=Speeds(bf16=1e12), memory_bandwidth=1e11, kernels=kernels)
    return Cluster(devices=(device,), link=Link(latency=meet, bandwidth=bandwidth))


FREE = cluster(float("inf"), 0)


@given(shapes(), groups, st.booleans())
def test_free_exchanges_cost_nothing(shape: Layers, t: int, sequence: bool) -> None:
    """A model on one place takes the time of its rows; exchanges that cost change no size."""
    model = Model.of_layers(shape, samples=2)
    asked: dict[str, Any] = {"model": model, "tensor": t, "sequence": sequence, "m": 2, "steps": 1}
    free, slow = (simulate("dp", 1, cluster=each, **asked) for each in (FREE, cluster(1e8, 1e-3)))
    (timed,), stages = free.request.timed_model.stages, stages_on(shape, t, sequence)
    assert timed.forward == pytest.approx(sum(seconds(stage.forward) for stage in stages), rel=1e-12)
    assert timed.backward == pytest.approx(sum(seconds(stage.backward) for stage in stages), rel=1e-12)
    assert timed.group_sum == 0
    assert slow.makespan > free.makespan and slow.peak_memory == free.peak_memory


def seconds(cost: Any) -> float:
    """Return the time of rows: a product's or its bytes' at a half each, a core's at a quarter, a pass's bytes."""
    times = 0.0
    for row, count in cost.rows:
        moved = row.moved / 5e10
        computed = row.done * row.flop / 2.5e11 if row.kind == CORE else max(row.flop / 5e11, moved)
        times += count * (computed if row.kind in (PRODUCT, CORE) else 1e-6 + moved)
    return times


RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("dp", 1, {"m": 3}),
    ("1f1b", 3, {"m": 4}),
    ("interleaved-1f1b", 4, {"m": 4, "chunks": 2}),
    ("zb-h1", 2, {"m": 4}),
    ("zbv", 4, {"m": 4}),
    ("pp-cdp", 3, {}),
    ("multi-cdp", 3, {}),
    ("dp", 1, {"m": 2, "shard": 2, "zero": 1}),
    ("dp", 3, {"m": 2, "shard": 2, "zero": 3}),
]


@given(
    shapes(),
    st.sampled_from(RUNS),
    groups,
    st.sampled_from([{}, {"sequence": True}, {"whole_boundaries": True}]),
    st.sampled_from(["none", "layer", "selective"]),
)
def test_every_invariant_holds(
    shape: Layers, run: tuple[str, int, dict[str, Any]], t: int, habits: dict[str, bool], recompute: str
) -> None:
    name, n, options = run
    model = Model.of_layers(replace(shape, layers=4, attention="eager"), samples=2)
    made = simulate(name, n, model=model, cluster=cluster(1e9, 1e-6), tensor=t, recompute=recompute, **habits | options)
    assert not violations(made)


@given(shapes(), st.sampled_from(RUNS))
def test_a_group_of_one_is_no_group(shape: Layers, run: tuple[str, int, dict[str, Any]]) -> None:
    """Times and memory are those without a mesh, to the bit."""
    name, n, options = run
    asked: dict[str, Any] = {"model": Model.of_layers(replace(shape, layers=4), samples=2)} | options
    asked |= {"cluster": cluster(1e9, 1e-6)}
    alone, grouped = simulate(name, n, **asked), simulate(name, n, tensor=1, **asked)
    assert (alone.start == grouped.start).all() and (alone.end == grouped.end).all()
    assert alone.peak_memory == grouped.peak_memory and alone.program.messages.size.sum() == (
        grouped.program.messages.size.sum()
    )
