"""Behaviours of runtimes: buffers beyond a schedule's needs, each declared by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, Request, RequestError, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import violations
from cdpsim.model.runtime import PAPER, Behaviours, Runtime, read_runtime
from cdpsim.program import Category, Content, Kind
from cdpsim.request import describe_request
from tests.helpers.every_row import every_row
from tests.helpers.figures import held_at
from tests.helpers.strategies import models, shapes

BEHAVIOURS: dict[str, list[Any]] = {
    "static_receives": [True],
    "kept_outputs": [True],
    "sends": ["until-next", "until-step-end"],
    "returned_outputs": [True],
    "whole_batch": [True],
    "kept_losses": [True],
    "gradients": ["zeroed", "kept"],
    "joint_updates": [True],
    "updates": ["loop", "foreach"],
    "split_backward": ["retained"],
    "gradient_buckets": ["copies", "views"],
    "gathers": ["whole", "copied"],
    "backward_prefetch": [True],
    "reductions": ["until-next"],
    "collective_copies": [True],
    "wide_shares": [True],
    "saved_states": [True],
    "keeps_gathered": [True],
    "weight_copies": [True],
    "fused_norms": [False],
    "fused_mlp": [False],
    "fused_rotary": [False],
}
FLUSHED = sorted(name for name, schedule in SCHEDULES.items() if schedule.order.together)
LAYER = Stage(
    forward=1.0,
    backward=2.0,
    weight_backward=1.0,
    activation=100,
    boundary=10,
    kept_output=4,
    parameters=20,
    first_gradients=3,
    update_loop=11,
    update_foreach=13,
    data=7,
)


def peaks(schedule: str, runtime: object, n: int = 4, **options: Any) -> list[int]:
    """The peak of each device, of stages that are equal."""
    cluster = Cluster() if SCHEDULES[schedule].placement.lanes else Cluster.unit()
    run = simulate(schedule, model=Model(stages=(LAYER,) * n), cluster=cluster, runtime=runtime, **options)  # type: ignore[arg-type]
    assert not violations(run)
    peak: list[int] = run.peaks[:, -1].tolist()
    return peak


def test_each_behaviour_is_in_the_law() -> None:
    assert list(BEHAVIOURS) == list(Behaviours._fields) == list(Runtime().__struct_fields__[1:])


@given(st.data())
def test_a_behaviour_lowers_no_peak(data: st.DataObject) -> None:
    """Each by itself, and each beside all of torch's; and devices hold what messages and passes need.

    A message of the next step that comes early has no place of its own in static buffers, which are those of one step.
    """
    name = data.draw(st.sampled_from(FLUSHED))
    schedule = SCHEDULES[name]
    shape = data.draw(st.sampled_from(shapes(schedule, 4)))
    model = data.draw(models(shape.n))
    more: dict[str, Callable[[Stage], Any]] = {
        "first_gradients": lambda stage: st.none() | st.integers(0, stage.gradient_bytes),
        "freed_output": lambda stage: st.none() | st.integers(0, stage.kept_output),
        "data": lambda stage: st.integers(0, stage.activation // 2),
        "update_loop": lambda stage: st.integers(0, 2 * stage.parameters),
        "update_foreach": lambda stage: st.integers(0, stage.parameters),
    }
    stages = tuple(
        msgspec.structs.replace(stage, **{field: data.draw(draw(stage)) for field, draw in more.items()})
        for stage in model.stages
    )
    behaviour = data.draw(st.sampled_from(sorted(BEHAVIOURS)))
    value = data.draw(st.sampled_from(BEHAVIOURS[behaviour]))
    base = data.draw(st.sampled_from([{}, {"like": "torch", behaviour: Behaviours._field_defaults[behaviour]}]))

    def run(runtime: Runtime) -> Any:
        own = msgspec.structs.replace(model, stages=stages, tied=(), runtime=runtime)
        cluster = Cluster.from_builtins({"devices": {"speed": "1 TFLOPS"}}, "cluster")
        options: dict[str, Any] = {"m": shape.m, "chunks": shape.chunks, "replicas": shape.replicas}
        options["steps"] = 1 if behaviour == "static_receives" else 2
        return simulate(schedule, shape.n, model=own, cluster=cluster, **options)

    without, having = run(Runtime(**base)), run(Runtime(**(base | {behaviour: value})))
    assert (having.peaks[:, -1] >= without.peaks[:, -1]).all()
    assert (having.end == without.end).all()
    assert not violations(having)


@pytest.mark.parametrize("name", ["single-cdp", "mp-cdp", "zero-cdp", "pipedream", "pipemare", "multi-cdp"])
def test_steps_that_overlap_have_no_behaviours_of_steps(name: str) -> None:
    """Gradients may be added to zeros; all else of torch's is of a step that ends."""
    for nothing in ("torch", "paper:static_receives=yes"):
        assert np.array_equal(peaks(name, nothing), peaks(name, "paper"))
    zeroed, fresh = (peaks(name, f"paper:gradients={how}") for how in ("zeroed", "fresh"))
    assert np.less_equal(fresh, zeroed).all()
    with pytest.raises(
        RequestError, match=f"^gradients: 'kept' needs steps that do not overlap, unlike those of {name};"
    ):
        peaks(name, "paper:gradients=kept")


def test_in_slots_only_parameters_and_gradients_weigh_anything() -> None:
    """Boundaries are 0 in memory there; gradients and parameters count as one."""
    assert simulate("1f1b", 4, runtime="torch").peaks.tolist() == simulate("1f1b", 4).peaks.tolist()
    plain, copies = simulate("multi-dp", 3), simulate("multi-dp", 3, runtime="torch")
    assert (copies.peaks[:, -1] - plain.peaks[:, -1]).tolist() == [3, 3, 3]
    assert copies.peaks[:, Category.COMMUNICATION].tolist() == [3, 3, 3]
    # In zero-dp's last stage's backward there are three activations, the own stage, that one, the next, and its copy.
    assert simulate("zero-dp", 3, runtime="torch").peaks[:2, -1].tolist() == [3 + 1 + 1 + 1 + 1] * 2


def test_views_are_the_gradients() -> None:
    """A bucket that has the gradients is there always; one beside them as well."""
    runs = {how: peaks("multi-dp", f"paper:gradient_buckets={how}") for how in ("none", "views", "copies")}
    # In the last backward of a pass, the first stage's, all gradients are there, but of this 3 of 20 bytes.
    assert runs["copies"] == [peak + 4 * 20 for peak in runs["none"]]
    assert all(a <= b <= c for a, b, c in zip(*runs.values(), strict=True))


def test_a_gradient_grows_in_the_first_backward() -> None:
    """Of two micro-batches on one device: 3 of 20 bytes while the first backward runs, then all."""
    run = simulate("gpipe", model=Model(stages=(LAYER,)), m=2, steps=1)
    rows = np.flatnonzero(run.memory["category"] == "gradients")
    changes = list(zip(run.memory["time"][rows].tolist(), run.memory["size"][rows].tolist(), strict=True))
    assert changes == [(2.0, 3), (4.0, 20), (6.0, 0)]


def test_a_variable_for_the_last_send_keeps_what_it_sent() -> None:
    """torch's 1F1B of three stages: each gradient until the next backward, and one output, of forward n - j - 2.

    That output stays until the cooldown has begun: of four backwards the second in the first stage, the third in the
    next one. The last stage sends no outputs, and the first no gradients.
    """
    model = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=10),) * 3)
    plain, keeps = (
        simulate("1f1b", model=model, cluster=Cluster(), m=4, steps=1, runtime=f"paper:sends={sends}")
        for sends in ("until-sent", "until-next")
    )
    forward, backward = (keeps.end[keeps.program.tasks_of_kind(kind)].T for kind in (Kind.F, Kind.B))
    for time in np.arange(0, 19, 0.5).tolist():
        held = np.zeros((2, 3), dtype=np.int64)
        for of, run in zip(held, (plain, keeps), strict=True):
            for (device, _), size in held_at(run, time).items():
                of[device] += size
        outputs = [forward[0, 1] <= time < backward[0, 1], forward[1, 0] <= time < backward[1, 2], False]
        gradients = [False, *(backward[1:, 0] <= time) & (time < backward[1:, 3])]
        assert (held[1] - held[0]).tolist() == [10 * sum(both) for both in zip(outputs, gradients, strict=True)]


def test_outputs_are_returned_until_the_next_step_begins() -> None:
    """The last stage's: as many as it has had forwards in a step, and all of them until it begins the next one."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=10),) * 2)
    run = simulate("gpipe", model=model, cluster=Cluster(), m=2, steps=4, runtime="paper:returned_outputs=yes")
    rows = (run.memory["category"] == "activations") & (run.memory["device"] == 1)
    found = list(zip(run.memory["time"][rows].tolist(), run.memory["size"][rows].tolist(), strict=True))
    begin, end = (times[run.program.tasks_of_kind(Kind.F)[:, -1]].reshape(4, 2) for times in (run.start, run.end))
    expected = [row for t in range(4) for row in ((begin[t, 0], 0), (end[t, 0], 10), (end[t, 1], 20))]
    assert found == [*expected[1:], (run.end[run.program.tasks_of_kind(Kind.B)[-1, -1]], 0)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "multi-dp"])
def test_kept_gradients_never_go(name: str) -> None:
    """Those of all stages of a device, in all steps: of one stage in a pipeline, of all where data are parallel."""
    run = simulate(
        name, model=Model(stages=(LAYER,) * 4), steps=3, cluster=Cluster.unit(), runtime="paper:gradients=kept"
    )
    rows = run.memory["category"] == "gradients"
    for device in range(4):
        own = rows & (run.memory["device"] == device)
        assert run.memory["time"][own].tolist()[0] == 0
        assert set(run.memory["size"][own][:-1].tolist()) == {80 if name == "multi-dp" else 20}


@pytest.mark.parametrize(
    ("name", "n", "runtime"),
    [
        ("zbv", 4, "torch:static_receives=no"),
        ("dualpipev", 4, "torch:static_receives=no"),
        ("zb-h1", 4, "torch:split_backward=freed,static_receives=no"),
        ("zb-h1", 4, "paper:kept_losses=yes"),
        ("zb-h2", 4, "paper:kept_losses=yes"),
    ],
)
def test_behaviours_of_split_backwards_keep_the_laws(name: str, n: int, runtime: str) -> None:
    """Of a model that ships, whose stages say what their first parts leave."""
    assert not violations(simulate(name, n, m=8, model="gpt2", cluster="h100-node", runtime=runtime))


@pytest.mark.parametrize("update", [None, 0.5])
def test_an_update_has_a_peak_of_its_own(update: float | None) -> None:
    """Beside parameters (20), gradients (20), a second of them in buckets (20), state (40) and data (7) of each stage.

    The peak of passes is the backward's: of the activation (100) and what there is of gradients. A loop makes as much
    as it does in the stage that needs most, for all at once each stage counts. Where it takes no time, too.
    """
    for made, loop, foreach in ((11, 11, 2 * 13), (200, 200, 2 * 300)):
        layer = msgspec.structs.replace(
            LAYER, update_loop=made, update_foreach=foreach // 2, optimizer=40, update=update
        )
        layers = (layer, msgspec.structs.replace(layer, update_loop=made // 2))

        def run(updates: str, layers: tuple[Stage, ...] = layers) -> Any:
            runtime = f"torch:updates={updates}"
            return simulate("multi-dp", model=Model(stages=layers), cluster=Cluster.unit(), runtime=runtime)

        always, passes = 2 * (20 + 20 + 40 + 7), run("fused").peaks[0, -1]
        for updates, size in (("loop", loop), ("foreach", foreach)):
            having = run(updates)
            assert not violations(having)
            assert set(having.peaks[:, -1]) == {max(passes, always + 2 * 20 + size)}
            assert set(having.peaks[:, Category.OPTIMIZER]) == {80 + size}


@pytest.mark.parametrize("update", [None, 0.5])
def test_a_pipeline_returns_all_outputs_in_one_tensor(update: float | None) -> None:
    """Before the update of the last of two stages, when the last device has 6 outputs, twice, and 6 micro-batches.

    There are its parameters (20), gradients (20), state (0), receive buffers (6 x 10), and the data of each (7).
    """
    layer = msgspec.structs.replace(LAYER, activation=24, update=update)
    for returned, outputs in (("yes", 2 * 6 * 10), ("no", 0)):
        runtime = f"torch:updates=fused,returned_outputs={returned}"
        run = simulate("1f1b", model=Model(stages=(layer,) * 2), m=6, cluster=Cluster.unit(), runtime=runtime)
        assert run.peaks[1, -1] == 20 + 20 + 6 * 10 + 6 * 7 + outputs or returned == "no"


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("update", [None, 0.5])
@pytest.mark.parametrize("name", ["dp", "interleaved-1f1b", "looped-bfs", "zbv", "dualpipev"])
def test_one_optimizer_updates_all_stages_of_a_device_behind_its_last_task(
    name: str, update: float | None, steps: int
) -> None:
    """What that makes for both is more than all passes hold: beside it is all that stays, and the returned outputs."""
    layer = msgspec.structs.replace(LAYER, update_foreach=10_000, optimizer=40, update=update)
    n: int = 2 if name == "dp" else 4
    shape: dict[str, Any] = {"m": 4} if name == "dp" else {"m": 8, "chunks": 2}
    run = simulate(
        name, model=Model(stages=(layer,) * n), cluster=Cluster.unit(), runtime="torch", steps=steps, **shape
    )
    places = [{0, 1}] if name == "dp" else [{0, 3}, {1, 2}] if name in ("zbv", "dualpipev") else [{0, 2}, {1, 3}]
    for device, own in enumerate(places):
        received = sum(10 * 8 * ((j > 0) + (j < n - 1)) for j in own) if name != "dp" else 0
        outputs = 10 * 8 if n - 1 in own and name != "dp" else 0
        data = 7 * shape["m"] * len(own)
        assert run.peaks[device, -1] == 2 * (20 + 20 + 40 + 10_000) + received + outputs + data
    assert not violations(run)


def test_joint_updates_hold_the_gradients_of_all_stages() -> None:
    """Two stages on a device: of a breadth-first order, the second's gradients are done while the first's are made."""
    for runtime, stages in (("paper", 1), ("paper:joint_updates=yes", 2)):
        run = simulate(
            "looped-bfs",
            model=Model(stages=(LAYER,) * 4),
            m=4,
            chunks=2,
            cluster=Cluster.unit(),
            steps=1,
            runtime=runtime,
        )
        rows = (run.memory["category"] == "gradients") & (run.memory["device"] == 0)
        assert run.memory["size"][rows].max() == stages * 20
        assert not violations(run)


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["zb-h1", "interleaved-zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("split", ["freed", "retained"])
@pytest.mark.parametrize("left", [None, 60])
def test_laws_hold_where_split_backwards_have_no_static_receives(name: str, split: str, left: int | None) -> None:
    """Outputs, and the inputs of losses, are then held beside what the first parts leave."""
    parts = {} if left is None else {"weight_activation": left, "weight_input": 10, "weight_output": 10}
    retained = {"retained_gradients": 40, "retained_input_transient": 100, "retained_weight_transient": 30}
    more: dict[str, Any] = {"chunks": 2} if name.startswith("interleaved") else {}
    n = 8 if name in ("zbv", "dualpipev") else 4
    model = Model(stages=(msgspec.structs.replace(LAYER, **parts, **retained),) * n)
    for behaviours in ({"like": "torch", "static_receives": False}, {"kept_losses": True, "kept_outputs": True}):
        runtime = Runtime(
            **behaviours | ({"split_backward": split} if split == "freed" or "like" not in behaviours else {})
        )
        own = msgspec.structs.replace(model, runtime=runtime)
        assert not violations(simulate(name, model=own, cluster=Cluster(), m=2 * n, **more))


@pytest.mark.parametrize("needed", [0, 4, 10])
def test_an_input_counts_once_that_weights_and_losses_need(needed: int) -> None:
    """The last stage's loss keeps 10 bytes from each B to the step's end; what W needs of them counts there until W."""
    layer = msgspec.structs.replace(LAYER, weight_activation=60, weight_input=needed, kept_output=0)
    plain, keeps = (
        simulate("zb-h1", model=Model(stages=(layer,) * 2, runtime=runtime), cluster=Cluster(), m=4, steps=1)
        for runtime in (PAPER, Runtime(kept_losses=True))
    )
    back, weights = (keeps.end[keeps.program.tasks_of_kind(kind)[:, -1]] for kind in (Kind.B, Kind.W))

    def activations(run: Any, time: float) -> int:
        rows = (run.memory["category"] == "activations") & (run.memory["device"] == 1) & (run.memory["time"] <= time)
        return int(run.memory["size"][rows][-1])

    for time in np.arange(back[0], weights[-1], 0.5).tolist():
        more = (10 - needed) * int((back <= time).sum()) + needed * int((weights <= time).sum())
        assert activations(keeps, time) - activations(plain, time) == more


RETAINED = {"retained_gradients": 40, "retained_input_transient": 100, "retained_weight_transient": 30}
FREED = {
    "weight_activation": 60,
    "weight_input": 10,
    "weight_output": 10,
    "input_transient": 50,
    "weight_transient": 20,
}


def test_a_whole_backward_of_torchs_may_need_less_than_two_parts() -> None:
    """All devices of DualPipe have their peaks in whole ones: with 5 bytes for one, and 50 for an input's part."""
    layer = msgspec.structs.replace(LAYER, **FREED | RETAINED, backward_transient=5)
    freed, retained = (
        simulate("dualpipe", model=Model(stages=(layer,) * 4, runtime=runtime), cluster=Cluster(), m=8).peaks[:, -1]
        for runtime in (PAPER, Runtime(split_backward="retained"))
    )
    assert (retained < freed).all()


# Sharded data parallelism: device d owns stage d of as many, and each is gathered for each use

SHARDS = (11, 23, 47, 95)  # bytes of the stages' parameters, and of their gradients: none is a sum of others
TRANSIENT = 7  # of each backward


def sharded(runtime: object, **options: Any) -> Any:
    """A run of stages that have nothing but parameters, and a transient in their backwards."""
    stages = tuple(
        Stage(forward=1.0, backward=2.0, activation=0, parameters=size, first_gradients=0, backward_transient=TRANSIENT)
        for size in SHARDS
    )
    run = simulate("zero-dp", model=Model(stages=stages), runtime=runtime, **{"cluster": Cluster.unit()} | options)  # type: ignore[arg-type]
    assert not violations(run)
    return run


def level(run: Any, device: int, time: float) -> int:
    """The memory of a device at a time, of all categories."""
    rows = (run.memory["device"] == device) & (run.memory["time"] <= time)
    categories = run.memory["category"][rows]
    return sum(int(run.memory["size"][rows][categories == name][-1]) for name in set(categories.tolist()))


def in_tasks(runtime: object, kind: Kind, **options: Any) -> np.ndarray:
    """The memory of devices in the middle of their tasks of the second step, by device and stage."""
    run = sharded(runtime, **options)
    tasks = run.program.tasks_of_kind(kind)[4:]
    middle = (run.start[tasks] + run.end[tasks]) / 2
    device = run.program.tasks.device[tasks]
    levels = np.zeros((4, 4), dtype=int)
    for row, stage in np.ndindex(4, 4):
        levels[device[row, stage], stage] = level(run, int(device[row, stage]), middle[row, stage])
    return levels


def added(behaviour: str, kind: Kind, base: str = "paper") -> list[list[int]]:
    """The bytes that a behaviour adds to each device in the task of each stage."""
    more = in_tasks(f"{base}{',' if ':' in base else ':'}{behaviour}", kind) - in_tasks(base, kind)
    return [[int(size) for size in row] for row in more]


NEXT = [0, *SHARDS[:-1]]  # of each stage, what the backward after its own needs
GIVEN = [*SHARDS[1:], 0]  # what the backward before it has given to a sum
OWNED = np.eye(4, dtype=int) * SHARDS  # what each device has of each stage without a copy


def test_what_sharded_data_parallelism_needs() -> None:
    """A device's own stage, the stage of the task where that is another, and sums until they are applied."""
    needed = np.array(SHARDS)[:, None] + np.array(SHARDS) - OWNED
    assert in_tasks("paper", Kind.F).tolist() == needed.tolist()
    assert in_tasks("paper", Kind.B).tolist() == (needed + TRANSIENT).tolist()
    sums = [[SHARDS[device] if stage < device else 0 for stage in range(4)] for device in range(4)]
    assert added("joint_updates=yes", Kind.B) == sums


@pytest.mark.parametrize("kind", [Kind.F, Kind.B])
def test_owners_may_gather_what_they_have(kind: Kind) -> None:
    assert added("gathers=whole", kind) == OWNED.tolist()


def test_a_gathering_buffer_is_there_beside_the_copies_of_it() -> None:
    """In a forward until the next one's are made; in a backward it goes when it has been copied."""
    assert added("gathers=copied", Kind.F) == (OWNED + np.array(SHARDS)).tolist()
    assert added("gathers=copied", Kind.B) == OWNED.tolist()


def test_a_backward_has_what_the_next_one_needs() -> None:
    """An owner has its own stage's anyway, unless it gathers that, too."""
    own = np.array(NEXT) - np.roll(OWNED, 1, axis=1)
    assert added("backward_prefetch=yes", Kind.B) == own.clip(0).tolist()
    assert added("backward_prefetch=yes", Kind.B, "paper:gathers=copied") == [NEXT] * 4
    assert added("backward_prefetch=yes", Kind.F) == np.zeros((4, 4), dtype=int).tolist()


def test_what_was_given_to_a_sum_stays_until_the_next_is_given() -> None:
    """On owners beside the sum. The first stage's is given last, and goes when it has been summed."""
    assert added("reductions=until-next", Kind.B) == [GIVEN] * 4
    assert added("reductions=until-next", Kind.F) == np.zeros((4, 4), dtype=int).tolist()


def test_a_copy_of_what_is_prefetched_counts_beyond_what_a_backward_makes() -> None:
    """The collective ends before the backward makes its transient."""
    more = added("collective_copies=yes", Kind.B, "paper:gathers=whole,backward_prefetch=yes")
    assert more == [[max(size - TRANSIENT, 0) for size in NEXT]] * 4
    assert added("collective_copies=yes", Kind.B) == np.zeros((4, 4), dtype=int).tolist()


SLOW = Cluster.from_builtins({"devices": {}, "link": {"latency": "1 s", "bandwidth": "1 TB/s"}}, "slow")


def test_collectives_copy_while_they_run() -> None:
    """The buffers of broadcasts on all but the sender, and of reductions, where these take time."""
    plain, copies = (sharded(runtime, cluster=SLOW) for runtime in ("paper", "paper:collective_copies=yes"))
    messages, nodes = plain.program.messages, plain.program.message_nodes
    start, end = plain.start[nodes], plain.end[nodes]
    brings = messages.content == Content.PARAMETERS
    for time in ((start + end) / 2).tolist():
        under_way = (start <= time) & (time < end)
        for device in range(4):
            rows = np.flatnonzero(under_way & ~(brings & (messages.stage == device)))
            size = sum(SHARDS[stage] for stage in messages.stage[rows].tolist())
            assert level(copies, device, time) - level(plain, device, time) == size


@pytest.mark.every_case
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("runtime", ["torch", "paper:gathers=whole,reductions=until-next,collective_copies=yes"])
def test_laws_hold_where_parameters_come_early(runtime: str, prefetch: int, expand: bool) -> None:
    options: dict[str, Any] = {"prefetch": prefetch, "expand_collectives": expand}
    assert not violations(simulate("zero-dp", 4, model="gpt2", cluster="h100-node", runtime=runtime, **options))


def test_what_a_message_brings_early_is_not_prefetched_again() -> None:
    """--prefetch brings all parameters a task early, and so what a backward's behaviour would have then."""
    first, second = (sharded(f"paper:backward_prefetch={how}", prefetch=1) for how in ("yes", "no"))
    assert np.array_equal(first.peaks, second.peaks)
    early = in_tasks("paper:gathers=copied", Kind.B, prefetch=1)
    assert early.tolist() == in_tasks("paper:gathers=copied,backward_prefetch=yes", Kind.B).tolist()


@pytest.mark.parametrize("behaviour", ["gathers=whole", "backward_prefetch=yes", "reductions=until-next"])
def test_nothing_is_gathered_where_parameters_stay(behaviour: str) -> None:
    for name in ("multi-dp", "1f1b", "zero-cdp"):
        assert np.array_equal(peaks(name, f"paper:{behaviour}"), peaks(name, "paper"))


@st.composite
def retaining_models(draw: st.DrawFn, n: int) -> Model:
    """Models whose parts, where they retain, leave and need as much as where they free; first stages have none."""
    first, *later = draw(models(n)).stages
    whole = {"weight_backward": first.backward, "weight_activation": None, "weight_input": 0, "weight_output": 0}
    fresh = draw(st.none() | st.integers(0, first.gradient_bytes))
    stages = [msgspec.structs.replace(first, first_gradients=fresh, **whole)]
    for stage in later:
        own = max(0, stage.activation - stages[-1].boundary)
        kept = max((stage.weight_activation or 0) - own, draw(st.integers(0, 10**6)))
        retained = {
            "first_gradients": draw(st.none() | st.integers(0, stage.gradient_bytes)),
            "retained_gradients": kept,
            "retained_input_transient": max(kept, stage.backward_transient) + draw(st.integers(0, 10**6)),
            "retained_weight_transient": draw(st.none() | st.just(stage.backward_transient + 1)),
        }
        stages.append(msgspec.structs.replace(stage, **retained))
    return Model(stages=tuple(stages))


@settings(max_examples=30)
@given(st.data())
def test_two_parts_that_retain_lower_a_peak_only_by_the_first_stages_gradients_to_come(data: st.DataObject) -> None:
    """On its device, by what its whole backward has yet to make at its highest moment; nowhere else."""
    schedule = SCHEDULES[data.draw(st.sampled_from(["zb-h1", "zb-h2", "interleaved-zero-bubble", "zbv"]))]
    shape = data.draw(st.sampled_from(shapes(schedule, 4)))
    model = data.draw(retaining_models(shape.n))
    options: dict[str, Any] = {"m": shape.m, "chunks": shape.chunks, "replicas": shape.replicas, "steps": 2}
    options["cluster"] = Cluster.from_builtins({"devices": {"speed": "1 TFLOPS"}}, "cluster")
    freed, retained = (
        simulate(schedule, model=msgspec.structs.replace(model, runtime=Runtime(split_backward=how)), **options).whole
        for how in ("freed", "retained")
    )
    first, tasks = model.stages[0], freed.program.tasks
    fresh = first.gradient_bytes if first.first_gradients is None else first.first_gradients
    to_come = np.zeros(freed.program.devices, dtype=np.int64)
    to_come[tasks.device[tasks.stage == 0]] = first.gradient_bytes - fresh
    assert (retained.peaks[:, -1] >= freed.peaks[:, -1] - to_come).all()
    assert not violations(retained)


@pytest.mark.parametrize("first_gradients", [7, 4, 0])
def test_a_first_stages_gradients_to_come_lower_a_peak(first_gradients: int) -> None:
    """One device has both stages, and its peak in the first one's backward: of 7 bytes of gradients some are to come.

    As the second stage's part has ended by then, it does not matter what that retains.
    """
    first = Stage(
        forward=1.0, backward=2.0, weight_backward=2.0, activation=50, parameters=7, first_gradients=first_gradients
    )
    second = Stage(
        forward=1.0,
        backward=2.0,
        weight_backward=1.0,
        activation=1,
        weight_activation=1,
        retained_gradients=0,
        retained_input_transient=0,
        retained_weight_transient=0,
        weight_transient=0,
    )
    first = msgspec.structs.replace(first, backward_transient=9)
    freed, retained = (
        simulate(
            "zbv", model=Model(stages=(first, second), runtime=Runtime(split_backward=how)), m=2, cluster=Cluster()
        )
        for how in ("freed", "retained")
    )
    assert (freed.peaks[:, -1] - retained.peaks[:, -1]).tolist() == [7 - first_gradients]


# How a runtime is given


def test_a_text_a_table_and_an_object_are_the_same() -> None:
    text, table = "torch:sends=until-sent,returned_outputs=no", {"sends": "until-sent", "returned_outputs": False}
    wanted = Runtime(like="torch", sends="until-sent", returned_outputs=False)
    assert read_runtime(text) == read_runtime({"like": "torch"} | table) == read_runtime(wanted) == wanted
    assert str(wanted) == text
    assert read_runtime("paper") == PAPER


@every_row(
    ("given_as", "problem"),
    [
        ("torhc", r"^runtime: unknown runtime 'torhc'; did you mean 'torch'\?$"),
        ("torch:sends", r"^sends: unknown sends ''; known are until-sent, until-step-end, until-next$"),
        ("torch:gathers=once", r"^gathers: unknown gathers 'once'; known are missing, whole, copied$"),
        ("torch:reductions=always", r"^reductions: unknown reductions 'always'; known are until-summed, until-next$"),
        ("torch:sends=later", r"^sends: unknown sends 'later'; known are"),
        ("torch:whole_batch=2", r"^whole_batch: unknown whole_batch '2'; known are yes, no$"),
        ("torch:whole=yes", r"^behaviour: unknown behaviour 'whole'; did you mean 'whole_batch'\?$"),
        ("torch:sends=until-sent,sends=until-next", r"^runtime: says sends twice; say it once$"),
        ({"likes": "torch"}, r"^behaviour: unknown behaviour 'likes'; did you mean 'like'\?$"),
        ({"whole_batch": "yes"}, r"^whole_batch: expected `bool \| null`, got `str`$"),
        (7, r"^runtime: 7 is no name, text or table; write for example 'torch:sends=until-sent'$"),
    ],
)
def test_what_is_no_runtime_is_refused(given_as: object, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        Request("gpipe", model=Model(stages=(LAYER,) * 2), runtime=given_as)  # type: ignore[arg-type]


def test_a_models_own_runtime_is_its_requests() -> None:
    """A request's comes before it."""
    model = Model(stages=(LAYER,) * 2, runtime=Runtime(like="torch"))
    again = Model.from_builtins(model.to_builtins(), "again")
    assert again == model
    assert model.table()["runtime"] == {"like": "torch"}
    own = simulate("gpipe", model=model)
    assert own.request.runtime == Runtime(like="torch")
    assert "runtime" not in own.request
    assert simulate(**own.request).peaks.tolist() == own.peaks.tolist()
    assert not violations(simulate("pipedream", model=model))
    paper = simulate("gpipe", model=model, runtime="paper")
    assert paper.request["runtime"] == {}
    assert simulate(**paper.request).peaks.tolist() == paper.peaks.tolist() != own.peaks.tolist()


def test_an_experiment_has_a_table_of_its_own(tmp_path: Path) -> None:
    """Beside its model, and before what that says."""
    Model(stages=(LAYER,) * 2, runtime=Runtime(like="torch")).save(tmp_path / "pair.toml")
    text = 'model = "pair.toml"\n[run]\nschedule = "gpipe"\n[runtime]\nlike = "torch"\nsends = "until-sent"\n'
    (tmp_path / "experiment.toml").write_text(text)
    request = Request.load(tmp_path / "experiment.toml")
    assert request.runtime == Runtime(like="torch", sends="until-sent")
    assert "runtime torch:sends=until-sent" in describe_request(request)


def test_a_record_makes_the_same_run() -> None:
    request = Request("1f1b", model=Model(stages=(LAYER,) * 2), m=4, runtime="torch:whole_batch=no")
    assert request["runtime"] == {"like": "torch", "whole_batch": False}
    assert Request.from_builtins(request.to_builtins()).runtime == request.runtime


# Data ranks with shares of everything: four stages of parameters alone, which four ranks share

SHARED = 4_000  # bytes of a stage's parameters, and of its gradients
SHARE = SHARED // 4


def shared(runtime: str, first_gradients: int = 0, **options: Any) -> int:
    """The peak of the first of four ranks that are alike."""
    stage = Stage(forward=1.0, backward=2.0, parameters=SHARED, first_gradients=first_gradients)
    run = simulate("dp", model=Model(stages=(stage,) * 4), replicas=4, runtime=runtime, **options)
    assert not violations(run)
    return int(run.peaks[0, -1])


def test_ranks_gather_for_the_backward_before_a_sum_is_let_go_of() -> None:
    """The peak is before the second last backward: its parameters, the next one's twice, and the sum of the last."""
    zero_3 = {"zero": 3, "prefetch": 0}
    shares = 4 * SHARE + 2 * SHARE  # of all parameters, and of the gradients of two stages
    assert shared("torch", **zero_3) == shares + 4 * SHARED
    assert shared("torch:collective_copies=no", **zero_3) == shares + 3 * SHARED
    in_forward = 4 * SHARE + 3 * SHARED  # the parameters, their buffer and the one before
    assert shared("torch:collective_copies=no,reductions=until-summed", **zero_3) == in_forward > shares + 2 * SHARED


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("excess", "beside"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_parameters_are_gathered_behind_a_loss(prefetch: int, direction: str, excess: int, beside: int) -> None:
    """A loss that takes as much more than what comes behind it replaces these: the last stage's, and the next one's.

    In a forward they are the last stage's and the buffer from which they were copied.
    """
    loss = {
        f"{direction}_transient": 9 * SHARED,
        "loss_forward" if direction == "forward" else "loss_gradient": excess * SHARED,
    }
    stage = Stage(forward=1.0, backward=2.0, parameters=SHARED, first_gradients=0)
    model = Model(stages=(*(stage,) * 3, msgspec.structs.replace(stage, **loss)))
    run = simulate("dp", model=model, replicas=4, runtime="torch", zero=3, prefetch=prefetch, steps=1)
    assert not violations(run)
    assert run.peaks[0, -1] == 4 * SHARE + (9 + beside) * SHARED


def test_parameters_that_are_prefetched_are_not_gathered_once_more() -> None:
    """FSDP2 gathers for the next backward by itself; with --prefetch that has been done before, on a slow link, too."""
    slow: dict[str, Any] = {"cluster": Cluster(devices=(Devices(overlap="stream"),), link=Link(bandwidth=SHARED / 4))}
    for prefetch in (0, 1, 2):
        options = slow | {"zero": 3, "prefetch": prefetch}
        own_gather = shared("torch", **options) - shared("torch:backward_prefetch=no", **options)
        assert (own_gather == 0) == (prefetch > 0)


def test_kept_parameters_are_copied_from_two_buffers() -> None:
    """The last forward's: the buffer of the stage before is there until they are copied from their own."""
    kept: dict[str, Any] = {"zero": 3, "prefetch": 0, "reshard": "no"}
    assert shared("torch", **kept) == 4 * SHARE + (4 + 2) * SHARED
    in_first_sum = 4 * SHARE + 3 * SHARED + 2 * SHARED + SHARE  # with gradients, a copy of them and a share
    assert shared("torch:gathers=missing", **kept) == in_first_sum > 4 * SHARE + 4 * SHARED


def test_gradients_that_wait_for_the_last_pass_are_whole() -> None:
    """In its first sum: all gradients, a buffer of one stage's and a share; three stages' parameters."""
    last: dict[str, Any] = {"zero": 3, "prefetch": 0, "reshard": "step", "reduce": "last", "m": 2}
    assert shared("torch", **last) == 4 * SHARE + (3 + 4 + 1) * SHARED + SHARE
    assert shared("torch:collective_copies=no", **last) == 4 * SHARE + (3 + 4 + 1) * SHARED


def test_views_take_gradients_with_the_last_pass() -> None:
    """Without a sum in each pass, gradients are added up beside the buckets that will have them."""
    parameters = gradients = buckets = 4 * SHARED
    assert shared("torch:gradient_buckets=views") == parameters + buckets
    assert shared("torch:gradient_buckets=views", m=2) == parameters + buckets + gradients
    assert shared("torch:gradient_buckets=views", m=2, reduce="each") == parameters + buckets
    assert shared("torch:gradient_buckets=views,gradients=kept", m=2) == parameters + buckets


@pytest.mark.parametrize("zero", [0, 1])
def test_whole_gradients_are_summed_in_copies(zero: int) -> None:
    """Also where the optimizer alone is split; shares of gradients have no buckets."""
    assert shared("torch", zero=zero, first_gradients=SHARED) == 3 * 4 * SHARED
    assert shared("torch", zero=2) == shared("paper", zero=2)
