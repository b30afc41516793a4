"""Recomputation layer by layer, of attention alone, and of reversible layers: bytes by the papers, and counted."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import simulate
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import Model, Recipe, Stage
from cdpsim.model.recipe import apply_recipe

pytestmark = pytest.mark.filterwarnings("error")

GIB = 2**30


def recomputed(model: Model, how: str, n: int = 1) -> tuple[Stage, ...]:
    return apply_recipe(model, Recipe(recompute=how), n).stages


# The formulas of Korthikanti et al. 2022: bytes of activations of one layer in 16 bits


def layer_of(s: int, b: int, h: int, a: int, t: int, *, sequence: bool) -> Stage:
    """A layer as table 2 has it: 34 s b h of linear layers, norms and dropout, and 5 a s^2 b of the core of attention.

    With sequence parallelism all of it is divided by t; without, 10 s b h are not. Its work is that of appendix A.
    """
    core = 5 * a * s * s * b // t
    linear = 34 * s * b * h // t if sequence else 10 * s * b * h + 24 * s * b * h // t
    given = 2 * s * b * h // (t if sequence else 1)
    work, scores = (24 * b * s * h * h + 4 * b * s * s * h) / t, 4 * b * s * s * h / t
    return Stage(
        forward=Work(work),
        backward=Work(2 * work),
        activation=linear + core,
        boundary=given,
        attention_activation=core,
        attention_forward=Work(scores),
    )


SMALL: dict[str, int] = {"s": 2048, "b": 4, "h": 6144, "a": 64, "t": 8}  # the 22B model of section 6


@pytest.mark.parametrize(
    ("how", "sequence", "formula"),
    [
        ("none", False, lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
        ("none", True, lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h)),
        ("selective", False, lambda s, b, h, a, t: s * b * h * (10 + 24 / t)),
        ("selective", True, lambda s, b, h, a, t: s * b * h * 34 / t),
        ("layer", False, lambda s, b, h, a, t: 2 * s * b * h),
    ],
)
def test_what_layers_keep_is_table_2_of_korthikanti(how: str, sequence: bool, formula: Any) -> None:
    """All but its first row, 34 + 5 a s / h, which is t = 1; of eight layers on the second of two stages."""
    for sizes in (SMALL, SMALL | {"t": 1}):
        model = Model(stages=(layer_of(**sizes, sequence=sequence),) * 16)
        assert recomputed(model, how, 2)[1].activation == 8 * formula(
            **{name: Fraction(size) for name, size in sizes.items()}
        )


def test_selective_recomputation_costs_the_core_alone() -> None:
    """Korthikanti et al. 2022, appendix A: forwards 72 + 12 s / h, hardware 72 + 16 s / h, in b s h^2 of a layer."""
    s, b, h, _, t = SMALL.values()
    model = apply_recipe(Model(stages=(layer_of(**SMALL, sequence=True),)), Recipe(recompute="selective"))
    assert model.flop == pytest.approx((72 + 12 * s / h) * b * s * h * h / t, rel=1e-12)
    assert model.computed_flop == pytest.approx((72 + 16 * s / h) * b * s * h * h / t, rel=1e-12)


# Fig. 1 of Korthikanti et al. 2022: GiB on the first device, of activations and of parameters with their states

# Layers, width, heads; devices, stages on each, size of a micro-batch; and micro-batches that reach the peak. Beyond
# them, the first device starts a forward only after a backward, so more change nothing.
FIGURE_1 = {
    "22B": (48, 6144, 64, 1, 1, 4, 1, 59.25, 9.5625, 45.5625),
    "175B": (96, 12288, 96, 8, 3, 1, 16, 66.84375, 12.3515625, 45.5625),
    "530B": (105, 20480, 128, 35, 3, 1, 70, 114.0234375, 23.076171875, 31.640625),
    "1T": (128, 25600, 160, 64, 1, 1, 64, 131.25, 26.5625, 32.958984375),
}


def run_of(name: str, how: str, *, in_file: bool = False) -> tuple[dict[str, float], float, float]:
    """Simulate a model of figure 1 whose layers have the bytes of the formulas.

    Return the first device's peaks in GiB, the activations that it has while it waits for its first backward, and the
    core of one layer. Layers hand nothing on here, which the figure leaves out. Without selective recomputation,
    there is no sequence parallelism.
    """
    layers, h, a, devices, chunks, b, m, *_ = FIGURE_1[name]
    whole = layer_of(2048, b, h, a, 8, sequence=how == "selective")
    core = whole.attention_activation
    if in_file:
        whole = replace(whole, activation=whole.activation - core, attention_activation=0, attention_forward=None)
    layer = replace(whole, boundary=0, forward=1.0, backward=2.0, attention_forward=None if in_file else 0.25)
    model = Model(stages=(replace(layer, parameters=2 * 12 * h * h // 8),) * layers, precision="bf16")
    schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
    adam: dict[str, Any] = {"optimizer": "adam", "mixed_precision": True, "gradients": "fp32"}
    size: dict[str, Any] = {"m": m, "steps": 1, "chunks": chunks, "recompute": "none" if in_file else how}
    trace = simulate(schedule, devices * chunks, model=model, **size, **adam)
    peaks = {kind: size / GIB for kind, size in trace.summary()["peak_memory"][0].items() if kind != "device"}
    tasks, memory = trace.tasks, trace.memory
    backward = tasks["start"][(tasks["device"] == 0) & (tasks["kind"] == "B")].min()
    rows = (memory["device"] == 0) & (memory["category"] == "activations") & (memory["time"] < backward)
    return peaks, memory["size"][rows][-1] / GIB, core / GIB


@pytest.mark.parametrize("name", FIGURE_1)
def test_memory_of_a_run_is_figure_1_of_korthikanti(name: str) -> None:
    """To the last bit: activations without recomputation, and what 18 bytes a parameter take."""
    *_, activations, _, states = FIGURE_1[name]
    peaks, _, _ = run_of(name, "none")
    assert peaks["activations"] == activations
    assert peaks["parameters"] + peaks["gradients"] + peaks["optimizer"] == states


@pytest.mark.parametrize("name", FIGURE_1)
def test_memory_with_selective_recomputation_is_figure_1_of_korthikanti(name: str) -> None:
    """To the last bit, where a file has the formula's bytes; and where it has those of a core, too.

    The figure leaves out the core of the layer that computes, which a run has on top while a task runs.
    """
    *_, activations, _ = FIGURE_1[name]
    assert run_of(name, "selective", in_file=True)[0]["activations"] == activations
    peaks, waiting, core = run_of(name, "selective")
    assert peaks["activations"] == activations + core
    if FIGURE_1[name][3] > 1:  # alone, a device waits for nothing
        assert waiting == activations


# Fig. 7 of Korthikanti et al. 2022: percentages of what tensor parallelism alone keeps, read off its bars; with
# sequence parallelism, with selective recomputation, with both, and with all computed again.
FIGURE_7 = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}


@pytest.mark.parametrize("name", FIGURE_7)
def test_shares_of_memory_are_those_of_figure_7_of_korthikanti(name: str) -> None:
    """To 0.2 points, as bars can be read."""
    _, h, a, _, _, b, *_ = FIGURE_1[name]

    def kept(how: str, *, sequence: bool) -> int:
        model = Model(stages=(layer_of(2048, b, h, a, 8, sequence=sequence),) * 2)
        return recomputed(model, how, 2)[1].activation

    ways = [("none", True), ("selective", False), ("selective", True), ("layer", False)]
    shares = [100 * kept(how, sequence=sequence) / kept("none", sequence=False) for how, sequence in ways]
    assert shares == pytest.approx(FIGURE_7[name], abs=0.2)


# Layers of a file, one by one


@st.composite
def layers_in_a_row(draw: st.DrawFn) -> Model:
    """Layers that hold their inputs, some with a core of attention, and of which some keep their sizes."""
    count = draw(st.integers(1, 7))
    boundaries = [draw(st.sampled_from([10, 10, 10, 25])) for _ in range(count)]
    layers = []
    for j in range(count):
        given = boundaries[j - 1] if j else 0
        data = draw(st.integers(0, 9)) if j in (0, count - 1) else 0
        core = draw(st.sampled_from([0, 0, 30]))
        layers.append(
            Stage(
                forward=Work(draw(st.integers(10, 99))),
                backward=Work(draw(st.integers(10, 99))),
                activation=given + data + core + draw(st.integers(0, 99)),
                forward_transient=draw(st.integers(0, 99)),
                backward_transient=draw(st.integers(0, 99)),
                boundary=boundaries[j],
                data=data,
                attention_activation=core,
                attention_forward=Work(7) if core else None,
            )
        )
    return Model(stages=tuple(layers))


@given(layers_in_a_row(), st.integers(1, 4))
def test_all_layers_one_by_one_are_each_layer(model: Model, n: int) -> None:
    n = min(n, model.n)
    assert recomputed(model, f"layers:{model.n}", n) == recomputed(model, "layer", n)


def test_embedding_and_head_are_computed_again_only_where_they_are_asked_for() -> None:
    """Two blocks of 100 bytes, inputs of 10 in these, an embedding that keeps 1, and a head of 10 and what losses keep.

    Four micro-batches in flight keep four logarithms of probabilities, 50 each, which layer+head makes one by one.
    """
    block = Stage(forward=1.0, backward=2.0, activation=100, boundary=10)
    embedding = Stage(forward=1.0, backward=2.0, activation=1, data=1, boundary=10, recomputes=False)
    head = Stage(forward=1.0, backward=2.0, activation=60, boundary=50, recomputes=False)
    model = Model(stages=(embedding, block, block, head))
    second = 1 + 10 + 100 + 10  # while the second block is computed again, with the gradient of its output
    for how, kept, again, highest in (
        ("layer", 1 + 10 + 10 + 60, 2, second),
        ("layers:1", 1 + 10 + 100 + 60, 1, 1 + 10 + 100 + 60),
        ("layer+head", 1 + 10 + 10 + 10, 4, second),
    ):
        (stage,) = recomputed(model, how)
        assert (stage.activation, stage.recomputed) == (kept, again)
        assert simulate("gpipe", 1, m=4, steps=1, model=model, recompute=how).peaks[0, 0] == 3 * kept + highest


@given(layers_in_a_row(), st.integers(1, 7))
def test_the_first_layers_of_a_stage_are_computed_again(model: Model, count: int) -> None:
    """They keep their inputs, the others all; and each has all of its own while it computes."""
    (stage,) = recomputed(model, f"layers:{count}")
    whole = model.stages
    inputs = [0, *(layer.boundary for layer in whole)]
    first, rest = whole[:count], whole[count:]
    kept = sum(inputs[: len(first)]) + sum(layer.data for layer in first) + sum(layer.activation for layer in rest)
    assert stage.activation == kept
    assert float(stage.recomputed or 0) == sum(layer.forward for layer in first)
    held, highest = kept, 0
    for k, layer in reversed(list(enumerate(whole))):  # data of layers that are done stay
        gradient = layer.boundary if k < len(whole) - 1 else 0
        if k < count:
            now = held - inputs[k] - layer.data + layer.activation
            highest = max(highest, now + gradient + max(layer.forward_transient, layer.backward_transient))
            held -= inputs[k]
        else:
            highest = max(highest, held + gradient + layer.backward_transient)
            held -= layer.activation - layer.data
    assert stage.activation + stage.backward_transient == max(kept, highest)


@given(layers_in_a_row())
def test_layers_hold_no_core_but_their_own(model: Model) -> None:
    """Counted layer by layer: all without cores is kept; a core is there while its layer computes, either way."""
    if not any(layer.attention_activation for layer in model.stages):
        with pytest.raises(RequestError, match="recompute: selective, but no stage says what the core"):
            recomputed(model, "selective")
        return
    (stage,) = recomputed(model, "selective")
    cores = [layer.attention_activation for layer in model.stages]
    kept = [layer.activation - core for layer, core in zip(model.stages, cores, strict=True)]
    assert stage.activation == sum(kept)
    forward = backward = 0
    for k, layer in enumerate(model.stages):
        later = sum(other.data for other in model.stages[k + 1 :])
        before = sum(kept[: k + 1]) + cores[k] + later
        gradient = layer.boundary if k < model.n - 1 else 0
        transient = max(layer.backward_transient, layer.forward_transient if cores[k] else 0)
        forward, backward = max(forward, before + layer.forward_transient), max(backward, before + gradient + transient)
    assert stage.activation + stage.forward_transient == max(forward, sum(kept))
    assert stage.activation + stage.backward_transient == max(backward, sum(kept))
    assert float(stage.recomputed or 0) == 7 * sum(core > 0 for core in cores)
    assert (stage.attention_activation, stage.attention_forward) == (0, None)


def test_reversible_layers_keep_their_last_output() -> None:
    """Four layers of 100 bytes, 10 of which are their input, between an embedding and a head: 10 instead of 400.

    The last one is the input of the head, a part of its 30. While a layer computes again there are its output, its 100
    and the gradient of its output, beside the byte of the embedding.
    """
    block = Stage(forward=1.0, backward=2.0, activation=100, boundary=10)
    embedding = Stage(forward=1.0, backward=2.0, activation=1, data=1, boundary=10)
    head = Stage(forward=1.0, backward=2.0, activation=30, backward_transient=25, boundary=7)
    (stage,) = recomputed(Model(stages=(embedding, *[block] * 4, head)), "reversible")
    assert stage.activation == 1 + 30
    assert (stage.forward, stage.backward, stage.recomputed) == (6.0, 12.0 + 4.0, 4.0)
    assert stage.activation + stage.backward_transient == 1 + 10 + 100 + 10
    middle = recomputed(Model(stages=(embedding, *[block] * 4, head)), "reversible", 3)[1]
    assert (middle.activation, middle.kept_output) == (10, 10)
    assert middle.activation + middle.backward_transient == 10 + 100 + 10


def test_a_longer_row_of_reversible_layers_holds_no_more() -> None:
    """Gomez et al. 2017, table 1: memory does not grow with depth; the backward takes half as long again."""
    block = Stage(forward=1.0, backward=2.0, activation=100, boundary=10)
    first = Stage(forward=1.0, backward=2.0, activation=1, data=1, boundary=10)
    peaks = set()
    for depth in (2, 8, 32):
        model = Model(stages=(first, *[block] * depth))
        trace = simulate("gpipe", 1, m=1, steps=1, model=model, recompute="reversible")
        peaks.add(trace.summary()["peak_memory"][0]["activations"])
        assert trace.summary()["makespan"] == 3 + 4 * depth
    assert len(peaks) == 1


@given(layers_in_a_row(), st.integers(1, 4), st.sampled_from(["layer", "layers:1", "selective", "reversible"]))
def test_recomputation_holds_no_more_between_passes_than_none(model: Model, n: int, how: str) -> None:
    n = min(n, model.n)
    plain = apply_recipe(model, Recipe(), n)
    try:
        own = apply_recipe(model, Recipe(recompute=how), n)
    except RequestError as error:
        assert error.subject == "recompute"
        return
    assert int(own.size("activation").sum()) <= int(plain.size("activation").sum())
    assert own.flop == plain.flop
    assert (own.computed_flop or 0) > (plain.flop or 0)


def test_an_input_part_that_needs_nothing_more_holds_what_is_computed_again() -> None:
    """10 bytes of activations, of which the second stage keeps its input of 4; 100 are of the weights' part alone."""
    sizes: dict[str, Any] = {"activation": 10, "boundary": 4, "weight_activation": 5, "backward_transient": 100}
    stage = Stage(forward=1.0, backward=2.0, weight_backward=1.0, input_transient=0, **sizes)
    found = apply_recipe(Model(stages=(stage, stage)), Recipe(recompute="full")).stages
    assert [each.input_transient for each in found] == [10, 6]


@pytest.mark.parametrize("how", ["full", "sqrt", "layer+head"])
def test_what_a_loss_keeps_is_computed_again(how: str) -> None:
    """A profile's head, whose activation the loss keeps: between passes its stage has the input alone."""
    layer = Stage(forward=1.0, backward=2.0, activation=8, boundary=2, parameters=1, recomputes=True)
    head = replace(layer, activation=12, loss_activation=12, boundary=0)
    *_, last = recomputed(Model(stages=(layer, head)), how, n=2)
    assert (last.activation, last.loss_activation) == (2, 0)


def test_what_cannot_be_computed_again_is_refused() -> None:
    bare = Model(stages=(Stage(forward=1.0, backward=2.0, activation=9, boundary=4),))
    for how, problem in (
        ("selective", "recompute: selective, but no stage says what the core of its attention keeps"),
        ("reversible", "recompute: reversible, but no layer gives as many bytes as it gets"),
        ("selective:core", "recompute: selective:core is of operators, which [layers] has; take --recompute layer"),
        (
            "selective:core+mm",
            "recompute: 'mm' is no operator whose output can be kept; known are products, products/2,",
        ),
        ("layers:", "recompute: 'layers:' does not end in a number of layers from 1"),
    ):
        with pytest.raises(RequestError) as refusal:
            apply_recipe(bare, Recipe(recompute=how))
        assert str(refusal.value).startswith(problem)
    small = Model(stages=(*bare.stages, Stage(forward=1.0, backward=2.0, activation=3, boundary=4)))
    for how in ("layer", "layers:2", "reversible"):
        with pytest.raises(RequestError, match="its activation is less than its input"):
            recomputed(small, how)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"attention_activation": 5}, "attention_forward: is missing beside attention_activation"),
        ({"attention_forward": 0.5}, "attention_activation: is missing beside attention_forward"),
        (
            {"attention_activation": 6, "attention_forward": 0.5},
            "attention_activation: must be at most activation less",
        ),
        ({"attention_activation": 5, "attention_forward": Work(1)}, "attention_forward: must be a time where forward"),
        ({"attention_activation": 5, "attention_forward": 1.5}, "attention_forward: must be at most forward"),
    ],
)
def test_a_core_is_a_part_of_its_stage(facts: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        Stage(forward=1.0, backward=2.0, activation=9, data=4, **facts)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_layers_that_are_stages_are_counted_together(count: int) -> None:
    """Of six layers with forwards of 1 s, the device of dp computes K again; of a line of three, each has two."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, activation=9, boundary=3, parameters=4),) * 6)
    for n in (None, 2, 6):
        run = simulate("dp", n, model=model, steps=1, recompute=f"layers:{count}")
        assert run.makespan == 18 + min(count, 6)
    asked: dict[str, Any] = {"model": model, "steps": 1, "recompute": f"layers:{count}", "shard": 1}
    stages, layers = (simulate("1f1b", 3, by_layer=each, **asked) for each in (False, True))
    busy = [[sum(t.end - t.start for t in run.tasks if t.device == d) for d in range(3)] for run in (stages, layers)]
    assert busy[0] == busy[1] == [3 * (6 + min(count, 2))] * 3
    again = simulate(**layers.request)
    assert again.makespan == layers.makespan


@pytest.mark.parametrize("recompute", ["layer", "layers:2", "layer+head", "selective", "none"])
def test_layers_that_are_stages_of_one_device_hold_what_they_hold_as_one_stage(recompute: str) -> None:
    """With --zero 3 each layer is a stage of its own, and computes its forward again from an input that it keeps."""
    options: dict[str, Any] = {"n": 1, "m": 3, "shard": 2, "recompute": recompute, "ignore_memory": True}
    one, each = (
        simulate("gpipe", **options, zero=zero, model="llama3-8b", cluster="a100-nodes").peaks[0, 0] for zero in (2, 3)
    )
    assert one == each
