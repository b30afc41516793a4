"""The costs of a training recipe, compared with the papers' numbers and with a moment-by-moment count of memory."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cdpsim
from cdpsim import presets
from cdpsim.cluster import Cluster, Devices
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import Model, Recipe, Stage
from cdpsim.model.recipe import apply_recipe

pytestmark = pytest.mark.filterwarnings("error")

BILLION = 10**9


def of_parameters(parameters: int, precision: str) -> Model:
    size = {"bf16": 2, "fp16": 2, "fp32": 4}[precision]
    return Model(stages=(Stage(forward=1, backward=2, parameters=size * parameters),), precision=precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_with_adam_takes_sixteen_bytes_a_parameter(precision: str) -> None:
    """Rajbhandari et al. 2020, section 3.1: the 1.5 billion parameters of GPT-2 take 24 GB."""
    model = of_parameters(15 * BILLION // 10, precision)
    (stage,) = apply_recipe(model, Recipe(optimizer="adam", mixed_precision=True)).stages
    sizes = apply_recipe(model, Recipe(optimizer="adam", mixed_precision=True))
    assert stage.optimizer == 12 * 15 * BILLION // 10
    assert sum(int(sizes.size(kind)[0]) for kind in ("parameters", "gradients", "optimizer")) == 24 * BILLION


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("optimizer", "mixed", "expected"),
    [
        ("sgd", False, 0),
        ("momentum", False, 2),
        ("adam", False, 4),
        ("adamw", False, 4),
        ("sgd", True, 4),  # the master copy alone
        ("momentum", True, 4 + 4),
        ("adam", True, 4 + 4 + 4),
        ("adamw", True, 4 + 4 + 4),
    ],
)
def test_optimizers_keep_so_many_bytes_for_each_parameter_in_bf16(optimizer: str, mixed: bool, expected: int) -> None:
    recipe = Recipe(optimizer=optimizer, mixed_precision=mixed)
    assert apply_recipe(of_parameters(7, "bf16"), recipe).stages[0].optimizer == 7 * expected


def test_adafactor_keeps_rows_and_columns() -> None:
    """Of a matrix of 30 by 50 and a vector of 50 in bf16: 80 sums and 50 numbers; and a master copy of all 1,550."""
    stage = Stage(forward=1, backward=2, parameters=2 * (30 * 50 + 50), factored=2 * (30 + 50 + 50))
    model = Model(stages=(stage,), precision="bf16")
    assert apply_recipe(model, Recipe(optimizer="adafactor")).stages[0].optimizer == 2 * 130
    assert apply_recipe(model, Recipe(optimizer="adafactor", mixed_precision=True)).stages[0].optimizer == 4 * (
        1550 + 130
    )


def test_an_optimizer_takes_the_place_of_the_models_own() -> None:
    model = Model(stages=(Stage(forward=1, backward=2, parameters=8, optimizer=5),))
    assert apply_recipe(model, Recipe(optimizer="adam")).stages[0].optimizer == 16
    assert apply_recipe(model, Recipe(recompute="full")).stages[0].optimizer == 5


# Recomputation


@st.composite
def networks(draw: st.DrawFn, work: bool = True) -> Model:
    """Layers in a row, each holding its input, of which no output is kept by its own layer."""
    count = draw(st.integers(1, 9))
    boundaries = [draw(st.integers(1, 50)) for _ in range(count)]
    layers = []
    for j in range(count):
        given = boundaries[j - 1] if j else 0
        data = draw(st.integers(0, 9)) if j in (0, count - 1) else 0
        activation = given + data + draw(st.integers(0, 99))
        layers.append(
            Stage(
                forward=Work(draw(st.integers(1, 99))),
                backward=Work(draw(st.integers(1, 99))),
                activation=activation,
                forward_transient=draw(st.integers(0, 99)),
                backward_transient=draw(st.integers(0, 99)),
                boundary=boundaries[j],
                data=data,
                inference=draw(st.none() | st.integers(given + data, activation)),
            )
        )
    return Model(stages=tuple(layers))


def played(layers: tuple[Stage, ...], given: int, segments: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Return the bytes kept, and the peaks of forward and backward, counted step by step."""
    kept = given + sum(layer.data for layer in layers) + sum(layers[begin - 1].boundary for begin, _ in segments[1:])
    held, forward = given + sum(layer.data for layer in layers), [kept]
    for begin, end in segments:
        if begin:
            held += layers[begin - 1].boundary
        for k in range(begin, end):
            known = layers[k].data + (layers[k - 1].boundary if k == begin and k else given if k == 0 else 0)
            own = layers[k].inference
            forward.append(held - known + (layers[k].activation + layers[k].forward_transient if own is None else own))
    backward = [kept]
    for begin, end in reversed(segments):
        beside = (
            held - sum(layers[k].data for k in range(begin, end)) - (layers[begin - 1].boundary if begin else given)
        )
        if end < len(layers):
            beside += layers[end - 1].boundary  # the gradient of what the segment gives
        alive = 0
        later = sum(layers[k].data for k in range(begin, end))
        for k in range(begin, end):
            later -= layers[k].data
            alive += layers[k].activation
            backward.append(beside + alive + later + layers[k].forward_transient)
        behind = 0  # data of layers that are done, which the caller has to the end
        for k in reversed(range(begin, end)):
            gradient = layers[k].boundary if k < end - 1 else 0
            backward.append(beside + alive + behind + gradient + layers[k].backward_transient)
            alive -= layers[k].activation
            behind += layers[k].data
        held -= layers[begin - 1].boundary if begin else given
    return kept, max(forward), max(backward)


@given(networks(), st.sampled_from(["full", "sqrt", "layer"]), st.data())
def test_recomputed_stages_hold_what_a_step_by_step_count_says(model: Model, how: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, model.n))
    stages = apply_recipe(model, Recipe(recompute=how), n).stages
    ends = (0, *model.cuts(n), model.n)
    for j, stage in enumerate(stages):
        layers = model.stages[ends[j] : ends[j + 1]]
        root = next(k for k in range(1, 9) if k * k >= len(layers))
        count = {"full": 1, "sqrt": root, "layer": len(layers)}[how]
        cuts = [k * len(layers) // count for k in range(count + 1)]
        given_to = model.stages[ends[j] - 1].boundary if j else 0
        found = played(layers, given_to, list(pairwise(cuts)))
        held = stage.activation
        assert (held, held + stage.forward_transient, held + stage.backward_transient) == found
        assert stage.kept_output == 0
        assert float(stage.forward) == sum(layer.forward for layer in layers)
        assert float(stage.backward) == sum(layer.backward + layer.forward for layer in layers)
        assert isinstance(stage.backward, Work)


def test_the_square_root_is_the_least_of_even_segments() -> None:
    """Chen et al. 2016, section 4.3: n equal layers in k segments cost n / k + k, least where k is n's square root.

    Here less two inputs: of the first segment, which weighs nothing, and of the last, which is in its activations; but
    beside the first segment there is the gradient of its output at least.
    """
    layer = Stage(forward=1, backward=2, activation=10**6, boundary=10**6)
    for n in (4, 9, 16, 36):
        (stage,) = apply_recipe(Model(stages=(layer,) * n), Recipe(recompute="sqrt"), 1).stages
        peak = (stage.activation + stage.backward_transient) / 10**6
        assert peak == min(n // k + max(k - 2, 1) for k in range(2, n) if n % k == 0)


def test_one_layer_has_one_segment() -> None:
    model = presets.model("gpt2")
    assert apply_recipe(model, Recipe(recompute="sqrt")).stages == apply_recipe(model, Recipe(recompute="full")).stages


@pytest.mark.parametrize("how", ["sqrt", "full"])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_what_is_computed_again_is_known_to_be(how: str, n: int) -> None:
    """A whole forward is computed again, in whatever segments; what the model itself costs stays what it is."""
    layers = tuple(
        Stage(forward=Work(1e9 * k), backward=Work(2.5e9 * k), activation=50, boundary=5) for k in range(1, 8)
    )
    plain = Model(stages=layers)
    again = apply_recipe(plain, Recipe(recompute=how), n)
    assert (plain.flop, plain.computed_flop) == (28 * 3.5e9, 28 * 3.5e9)
    assert (again.flop, again.computed_flop) == (28 * 3.5e9, 28 * 4.5e9)
    assert again.n == n
    twice = apply_recipe(again, Recipe(recompute=how))
    assert (twice.flop, twice.computed_flop) == (28 * 3.5e9, 28 * 5.5e9)
    assert Model(stages=(*layers, Stage(forward=1.0, backward=1.0))).flop is None


def test_no_recipe_changes_nothing() -> None:
    model = presets.model("vit-b16").without_curves()
    assert apply_recipe(model) is model
    assert apply_recipe(model, Recipe(), 4) == model.grouped(4)
    assert apply_recipe(Model.unit(5)) == Model.unit(5)


def test_a_model_says_itself_how_it_is_trained() -> None:
    model = presets.model("gpt2")
    recipe = Recipe(optimizer="adam", mixed_precision=True, recompute="sqrt")
    own = msgspec.structs.replace(model, training=recipe)
    assert apply_recipe(own, n=4) == apply_recipe(model, recipe, 4)
    assert apply_recipe(own, n=4).training == Recipe()
    assert Model.from_builtins(own.to_builtins(), "x") == own
    assert own.table()["training"] == {"optimizer": "adam", "mixed_precision": True, "recompute": "sqrt"}


BOX = Cluster(devices=(Devices(speed=1e13),))


def peaks(trace: cdpsim.Trace) -> dict[str, int]:
    return {key: max(device[key] for device in trace.summary()["peak_memory"]) for key in ("activations", "optimizer")}


def test_a_run_is_of_the_model_as_it_is_trained() -> None:
    gpt2 = presets.model("gpt2")
    plain = cdpsim.simulate("pp-cdp", 4, model="gpt2", cluster=BOX, optimizer="sgd", mixed_precision=False)
    asked: dict[str, Any] = {"optimizer": "adam", "mixed_precision": True, "recompute": "full"}
    trained = cdpsim.simulate("pp-cdp", 4, model="gpt2", cluster=BOX, **asked)
    file = msgspec.structs.replace(gpt2, training=Recipe(**asked))
    same = cdpsim.simulate("pp-cdp", 4, model=file, cluster=BOX).summary() | {"request": trained.request.to_builtins()}
    assert same == trained.summary()
    assert peaks(plain)["optimizer"] == 0
    heaviest = max(int(stage.parameters) for stage in gpt2.grouped(4).stages)
    assert peaks(trained)["optimizer"] == 6 * heaviest
    assert peaks(trained)["activations"] < peaks(plain)["activations"]
    assert trained.summary()["makespan"] > plain.summary()["makespan"]
    other = cdpsim.simulate("pp-cdp", 4, model=file, cluster=BOX, mixed_precision=False, recompute="none")
    assert peaks(other)["optimizer"] == 2 * heaviest
    shipped = cdpsim.simulate("pp-cdp", 4, model="gpt2", cluster=BOX)
    assert peaks(shipped)["optimizer"] == 6 * heaviest  # Adam in mixed precision


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"optimizer": "adams"}, "optimizer: unknown optimizer 'adams'; did you mean 'adam'?"),
        ({"recompute": "all"}, "recompute: unknown recompute 'all'; "),
        (
            {"recompute": "layers:0"},
            "recompute: 'layers:0' does not end in a number of layers from 1 to 1000000; write",
        ),
        ({"mixed_precision": True}, "mixed_precision: what is kept in fp32 depends on the optimizer; name one"),
        ({"mixed_precision": "yes"}, "mixed_precision: expected `bool`"),
        ({"optimiser": "adam"}, "unknown field 'optimiser'; did you mean 'optimizer'?"),
    ],
)
def test_a_wrong_recipe_is_refused(recipe: dict[str, object], problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Model.from_builtins({"training": recipe, "stages": [{"forward": 1, "backward": 2}]}, "toy.toml")
    assert problem.split(": ", 1)[-1] in str(refusal.value)
    assert str(refusal.value).startswith("toy.toml: $.training")


def refused(model: Model, **recipe: object) -> str:
    with pytest.raises(RequestError) as refusal:
        apply_recipe(model, Recipe(**recipe))  # type: ignore[arg-type]
    return str(refusal.value)


def test_what_cannot_be_trained_so_is_refused() -> None:
    mixed = {"optimizer": "adam", "mixed_precision": True}
    assert refused(of_parameters(1, "fp32"), **mixed).startswith("mixed_precision: the model's bytes are in fp32; give")
    bare = Model(stages=(Stage(forward=1, backward=2, parameters=4),))
    assert "the model does not say what its bytes are in; give" in refused(bare, **mixed)
    assert refused(bare, optimizer="adafactor").startswith("stage 0: does not say what the rows and columns")
    assert refused(Model.unit(2), recompute="full").startswith("training: the slot model has no bytes and no layers")
    small = Model(stages=(Stage(forward=1, backward=2, boundary=9), Stage(forward=1, backward=2, activation=8)))
    assert refused(small, recompute="full").startswith("stage 1: its activation is less than its input")
    costs = Model(stages=(Stage(forward=1, backward=Work(2)),))
    assert "some cost work and some time" in refused(costs, recompute="full")
    own = {"training": {"optimizer": "adam"}, "stages": [{"forward": 1, "backward": 2, "optimizer": 7}]}
    with pytest.raises(RequestError, match=r"toy: \$.training: stages say what their optimizer weighs; leave that out"):
        Model.from_builtins(own, "toy")


def test_a_recipe_says_in_words_what_it_is() -> None:
    """Nothing of what is usual."""
    assert Recipe().description == []
    assert Recipe(optimizer="adam", mixed_precision=True).description == ["adam", "mixed precision"]
    every = Recipe(optimizer="sgd", gradients="fp32", update_time="memory", recompute="full", offload="activations")
    said = ["sgd", "gradients fp32", "update time memory", "recompute full", "offload activations"]
    assert every.description == said
