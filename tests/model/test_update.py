"""Bytes that an update keeps, sends, reads and writes for each parameter, by the papers, and times from them."""

from typing import Any

import pytest
from msgspec.structs import replace

from cdpsim import simulate
from cdpsim.cluster import Cluster, Devices, Link
from cdpsim.errors import RequestError
from cdpsim.model import OPTIMIZERS, PRECISIONS, GradientType, Model, Recipe, Stage, Tie
from cdpsim.model.recipe import apply_recipe
from tests.helpers.profiles import A100

pytestmark = pytest.mark.filterwarnings("error")

ROWS, COLUMNS = 512, 768
NUMBERS = ROWS * COLUMNS


def of_matrix(precision: str = "bf16", **facts: Any) -> Model:
    """A model of one matrix."""
    width = PRECISIONS[precision]
    sizes = {"parameters": NUMBERS * width, "factored": (ROWS + COLUMNS) * width}
    return Model(stages=(Stage(forward=1.0, backward=2.0, **sizes | facts),), precision=precision)


def trained(model: Model, **recipe: Any) -> Stage:
    (stage,) = apply_recipe(model, Recipe(**recipe)).stages
    return stage


SUMS = (ROWS + COLUMNS) / NUMBERS
# Bytes for each parameter beside weight, gradient and master copy, where states are in fp32.
STATES = {
    "sgd": 0,
    "momentum": 4,
    "adam": 8,
    "adamw": 8,
    "adafactor": 4 * SUMS,
    "lion": 4,
    "sm3": 4 * SUMS,
    "adam-8bit": 2 + 2 * 4 / 256,
    "lamb": 8,
    "lars": 4,
}


def test_all_optimizers_have_a_state() -> None:
    assert tuple(STATES) == OPTIMIZERS


@pytest.mark.every_case
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_take_so_many_bytes_for_each_parameter(optimizer: str) -> None:
    """In fp32; in mixed precision with a master copy; in bf16 alone half of it, but for 8 bits."""
    wide, mixed, narrow = (
        trained(of_matrix("fp32"), optimizer=optimizer).optimizer,
        trained(of_matrix(), optimizer=optimizer, mixed_precision=True).optimizer,
        trained(of_matrix(), optimizer=optimizer).optimizer,
    )
    assert wide == STATES[optimizer] * NUMBERS
    assert mixed == wide + 4 * NUMBERS
    assert narrow == (wide if optimizer == "adam-8bit" else wide / 2)


def test_blocks_of_8_bit_states_are_begun_ones() -> None:
    """Two moments of 257 numbers in two blocks: 2 (257 + 2 * 4)."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=2 * 257),), precision="bf16")
    assert trained(model, optimizer="adam-8bit").optimizer == 2 * (257 + 2 * 4)


def test_shapes_of_tensors_say_what_is_kept_of_each() -> None:
    """Of a convolution's kernel of 64 x 32 x 3 x 3 and a vector of 64, in fp32 and in mixed precision.

    Adafactor keeps rows and columns of 64 x 32 matrices of 3 x 3; SM3 a number for each of 64 + 32 + 3 + 3 places; 8
    bits have 72 blocks in the kernel, and leave the vector wide.
    """
    shapes, numbers = ((64, 32, 3, 3), (64,)), 64 * 32 * 9 + 64
    kept = {
        "adafactor": 4 * (64 * 32 * (3 + 3) + 64),
        "sm3": 4 * (64 + 32 + 3 + 3 + 64),
        "adam-8bit": 2 * (64 * 32 * 9 + 4 * 72 + 4 * 64),
        "adam": 8 * numbers,
    }
    for optimizer, expected in kept.items():
        for precision, width in (("fp32", 4), ("bf16", 2)):
            stage = Stage(forward=1.0, backward=2.0, parameters=width * numbers, tensors=shapes)
            model = Model(stages=(stage,), precision=precision)
            mixed = precision == "bf16"
            found = trained(model, optimizer=optimizer, mixed_precision=mixed).optimizer
            assert found == expected + 4 * numbers * mixed
            assert trained(replace(model, precision=""), optimizer=optimizer).optimizer == (
                expected if not mixed or optimizer == "adam-8bit" else expected // 2
            )


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("precision", "recipe", "parts"),
    [
        ("fp32", {}, (4, 4, 8)),
        ("bf16", {"mixed_precision": True}, (2, 2, 12)),  # Rajbhandari et al. 2020, section 3.1
        ("bf16", {"mixed_precision": True, "gradients": "fp32"}, (2, 4, 12)),
        ("fp16", {"mixed_precision": True, "gradients": "fp32"}, (2, 4, 12)),
        ("fp16", {"mixed_precision": True, "gradients": "fp16"}, (2, 2, 16)),
        ("bf16", {"mixed_precision": True, "gradients": "bf16"}, (2, 2, 16)),
        ("bf16", {"gradients": "fp32"}, (2, 4, 4)),
        ("fp32", {"gradients": "bf16"}, (4, 2, 8)),
    ],
)
def test_adam_takes_16_18_or_20_bytes_a_parameter(
    precision: str, recipe: dict[str, Any], parts: tuple[int, int, int]
) -> None:
    """Megatron-LM's distributed optimizer, table of its docs without distribution: 20, 18 and 16 bytes."""
    model = apply_recipe(of_matrix(precision), Recipe(optimizer="adam", **recipe))
    assert tuple(int(model.size(kind)[0]) / NUMBERS for kind in ("parameters", "gradients", "optimizer")) == parts


def test_gradients_of_some_of_the_parameters_widen_as_others() -> None:
    """And none of them is there only late: sums in another type are buffers."""
    model = of_matrix(gradients=100, first_gradients=40)
    assert trained(model, gradients="fp32").gradients == 200
    assert trained(model, gradients="fp32").first_gradients is None
    copied = trained(model, optimizer="adam", mixed_precision=True, gradients="bf16")
    assert (copied.gradients, copied.first_gradients) == (100, 40)
    assert copied.optimizer == 12 * NUMBERS + 200


def test_a_tied_gradient_widens_too() -> None:
    stage = Stage(forward=1.0, backward=2.0, parameters=100)
    model = Model(stages=(stage, stage), tied=(Tie(stages=(0, 1), parameters=60),), precision="bf16")
    own = apply_recipe(model, Recipe(optimizer="adam", gradients="fp32", update_time="memory"))
    assert (own.tied[0].gradients, own.tied[0].optimizer) == (120, 120)
    once = apply_recipe(model, Recipe(optimizer="adam", gradients="fp32", update_time="memory"), 1).stages[0]
    assert (once.parameters, once.gradients, once.optimizer) == (140, 280, 280)
    assert once.update_bytes == 2 * 280 + 280 + 2 * 140  # states, gradients, weights


def test_gradients_travel_in_their_type() -> None:
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=100),) * 2, precision="bf16")
    cluster = Cluster(link=Link(bandwidth=10.0))

    def sent(**options: Any) -> list[int]:
        messages = simulate("multi-dp", model=model, cluster=cluster, **options).messages
        return sorted(set(messages["size"][messages["content"] == "gradient"].tolist()))

    assert (sent(), sent(gradients="fp32")) == ([100], [200])


# Bytes that an update moves

# Tensors that each pass reads and writes: gradients g, weights w, and states m, v and s (sums).
PASSES = {
    "sgd": ["g w -> w"],
    "momentum": ["g w m -> w m"],
    "adam": ["g w m v -> w m v"],
    "adamw": ["g w m v -> w m v"],
    "adafactor": ["g w s -> s", "g s ->", "g w s -> w"],
    "lion": ["g w m -> w m"],
    "sm3": ["g w s -> w s"],
    "adam-8bit": ["g w q q -> w q q"],
    "lamb": ["g w m v -> m v", "w m v -> w"],
    "lars": ["g w ->", "g w m -> w m"],
}


@pytest.mark.every_case
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mixed", [False, True])
def test_an_update_moves_what_its_passes_read_and_write(optimizer: str, mixed: bool) -> None:
    number = 4 if mixed else 2
    sizes = {"g": 2, "w": number, "m": number, "v": number, "s": number * SUMS, "q": 1 + 4 / 256}
    tensors = " ".join(PASSES[optimizer]).replace("->", "").split()
    expected = sum(sizes[tensor] for tensor in tensors) + (4 + 2) * mixed  # the new weights, in two bytes
    stage = trained(of_matrix(), optimizer=optimizer, mixed_precision=mixed, update_time="memory")
    assert stage.update_bytes / NUMBERS == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("precision", "gradients", "how", "expected"),
    [
        ("bf16", "fp32", "memory", 28 + 6),
        ("bf16", "fp32", "clipped", 28 + 6 + 12),  # read for the norm, read and written
        ("bf16", "bf16", "memory", 6 + 28 + 6),  # copied to fp32 before
        ("bf16", None, "memory", 26 + 6),
        ("fp16", "fp16", "clipped", 60),  # copied 6, unscaled 8, norm 4, clipped 8
        ("fp16", "fp32", "memory", 8 + 28 + 6),
    ],
)
def test_adam_moves_34_bytes_a_parameter_and_with_scaling_and_clipping_60(
    precision: str, gradients: str | None, how: str, expected: int
) -> None:
    recipe: dict[str, Any] = {"optimizer": "adam", "mixed_precision": True, "gradients": gradients}
    assert trained(of_matrix(precision), **recipe, update_time=how).update_bytes == expected * NUMBERS


def test_an_update_takes_its_bytes_over_the_bandwidth_of_its_device() -> None:
    """A forward of 1 s and a backward of 2 s; an update of 10 s on one device, and of 5 s on the other."""
    stage = Stage(forward=1.0, backward=2.0, parameters=100, update_bytes=1000)
    devices = tuple(Devices(count=1, memory_bandwidth=bandwidth) for bandwidth in (100.0, 200.0))
    tasks = simulate("gpipe", m=1, steps=1, model=Model(stages=(stage, stage)), cluster=Cluster(devices=devices)).tasks
    updates = tasks["kind"] == "U"
    lasts = dict(zip(tasks["stage"][updates].tolist(), (tasks["end"] - tasks["start"])[updates].tolist(), strict=True))
    assert lasts == {0: 10.0, 1: 5.0}
    both = replace(stage, update=3.0)
    run = simulate("gpipe", m=1, steps=1, model=Model(stages=(both,)), cluster=Cluster(devices=devices[:1]))
    assert run.summary()["makespan"] == 1 + 2 + 3 + 10


def test_a_run_asks_for_updates_by_the_data_sheet() -> None:
    """GPT-2 on one A100: 32 bytes for each of 124,439,808 parameters, at 2,039 GB/s, in each of three steps."""
    alone: dict[str, Any] = {"model": "gpt2", "cluster": A100, "m": 1, "steps": 3}
    plain, timed = (simulate("gpipe", 1, **alone, update_time=how) for how in (None, "memory"))
    more = timed.summary()["makespan"] - plain.summary()["makespan"]
    assert more == pytest.approx(3 * 32 * 124_439_808 / 2.039e12, rel=1e-9)
    assert timed.request["update_time"] == "memory"
    assert simulate(**timed.request).summary() == timed.summary()


def refused(model: Model, **recipe: Any) -> str:
    with pytest.raises(RequestError) as refusal:
        apply_recipe(model, Recipe(**recipe))
    return str(refusal.value)


def test_gradients_in_the_type_of_the_parameters_are_as_large() -> None:
    types: list[tuple[str, GradientType]] = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp16")]
    for precision, gradients in types:
        plain = apply_recipe(of_matrix(precision), Recipe())
        named = apply_recipe(of_matrix(precision), Recipe(gradients=gradients))
        assert named.all_sizes == plain.all_sizes


def test_what_is_not_known_is_refused() -> None:
    bare = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=4),))
    assert refused(bare, gradients="fp32").startswith("gradients: fp32 asks for another type, and the model does not")
    assert refused(bare, optimizer="adam-8bit").startswith("optimizer: adam-8bit keeps bytes for each number, and the")
    assert refused(bare, optimizer="sm3").startswith("stage 0: does not say what the rows and columns")
    assert refused(of_matrix(), update_time="memory").startswith("update_time: what an update reads and writes depends")
    assert refused(of_matrix(), gradients="fp8").startswith("gradients: unknown gradients 'fp8'")
    adam: dict[str, Any] = {"optimizer": "adam", "update_time": "memory"}
    assert refused(of_matrix(), **adam, offload="optimizer").startswith("update_time: hosts update, and memory_band")
    assert refused(of_matrix(update=1.0), **adam).startswith("update_time: stages say themselves what an update takes")
    with pytest.raises(RequestError, match="cluster: devices have no memory_bandwidth, of which updates take their"):
        simulate("gpipe", m=1, model=of_matrix(), cluster=Cluster(devices=(Devices(speed=1.0),)), **adam)
    with pytest.raises(RequestError, match="update_bytes: is on the device, but host_optimizer says that updates"):
        of_matrix(host_optimizer=4, update_bytes=4)
