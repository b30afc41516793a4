"""Tied tensors: counted once on a device, summed over their copies where steps flush, and untied everywhere else."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, Stage, Tie, presets, simulate
from cdpsim.cli import main
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import violations
from cdpsim.model import Recipe
from cdpsim.model.recipe import apply_recipe
from cdpsim.request.options import Contention
from cdpsim.runs import Run
from cdpsim.studies.compare import measure
from cdpsim.studies.superpose import worker_curve
from tests.helpers.every_row import every_row
from tests.helpers.profiles import profiled
from tests.helpers.svg import read

# Four stages, the first and the last of which share a tensor of 60 bytes; an optimizer keeps twice as much of each.
PARAMETERS = (100, 30, 40, 70)
TIED = 60
GPT2 = 50_257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768  # Radford et al. 2019: 124,439,808
LLAMA = 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 2 * 32_000 * 4096 + 4096


def model(*ties: Tie, **more: Any) -> Model:
    times: dict[str, Any] = {"forward": 1.0, "backward": 2.0, "weight_backward": 1.0, "boundary": 1, "activation": 5}
    stages = [Stage(**{**times, **more}, parameters=own, optimizer=2 * own) for own in PARAMETERS]
    return Model(stages=tuple(stages), tied=ties)


HEAD = model(Tie(stages=(0, 3), parameters=TIED, optimizer=2 * TIED))
APART = model()
SLOW = Cluster(devices=(Devices(),), link=Link(latency=0.5, bandwidth=20.0))

# Of each schedule that flushes, what each device of a run in four stages has: its stages' bytes, less a second copy.
COUNTED: dict[str, tuple[Any, list[int]]] = {
    "single-dp": ({}, [180]),
    "multi-dp": ({"m": 2}, [180, 180]),  # 100 + 30 + 40 + 10
    "mp-dp": ({"m": 2}, [100, 30, 40, 70] * 2),
    "gpipe": ({"m": 4}, [100, 30, 40, 70]),
    "1f1b": ({"m": 4, "replicas": 2}, [100, 30, 40, 70] * 2),
    "zb-h1": ({"m": 4}, [100, 30, 40, 70]),
    "interleaved-1f1b": ({"m": 2, "chunks": 2}, [100 + 40, 30 + 70]),
    "zbv": ({"m": 4}, [100 + 10, 30 + 40]),
    "dualpipev": ({"m": 4}, [100 + 10, 30 + 40]),
    "dualpipe": ({"m": 8}, [100 + 10, 30 + 40, 30 + 40, 100 + 10]),
    "chimera": ({"m": 4}, [100 + 10, 30 + 40, 30 + 40, 100 + 10]),
    "gems": ({"m": 4}, [100 + 10, 30 + 40, 30 + 40, 100 + 10]),
}
UNTIED: dict[str, Any] = {
    "pp-cdp": {},
    "mp-cdp": {},
    "zero-cdp": {},
    "pipedream": {},
    "pipedream-2bw": {"replicas": 2},
    "pipemare": {},
}


def peaks(trace: Run, category: str) -> list[int]:
    return [device[category] for device in trace.summary()["peak_memory"]]


def sums(trace: Run, step: int = 0) -> list[tuple[int, str, int]]:
    """The all-reduces of a step: stage, members, size."""
    messages = trace.messages
    rows = np.flatnonzero((messages["op"] == "all_reduce") & (messages["step"] == step))
    columns = (messages[name][rows].tolist() for name in ("stage", "dst", "size"))
    return sorted(zip(*columns, strict=True))


# Memory of devices


@pytest.mark.every_case
@pytest.mark.parametrize("name", COUNTED)
def test_what_devices_have_is_counted_by_hand(name: str) -> None:
    asked, expected = COUNTED[name]
    trace = simulate(name, 4, model=HEAD, **asked)
    assert peaks(trace, "parameters") == expected
    assert peaks(trace, "optimizer") == [2 * own for own in expected]
    if name not in ("single-dp", "interleaved-1f1b"):  # where a stage is updated before others have all gradients
        assert peaks(trace, "gradients") == expected
    assert "untied" not in trace.summary()
    assert not violations(trace)


@pytest.mark.parametrize("name", ["single-cdp", "multi-cdp", "multi-dp", "single-dp"])
def test_a_device_of_all_stages_holds_parameters_as_if_the_last_stage_had_none_of_the_tensor(name: str) -> None:
    """All versions of it are those of the first stage."""
    last = msgspec.structs.replace(APART.stages[3], parameters=10, optimizer=20)
    less = msgspec.structs.replace(APART, stages=(*APART.stages[:3], last))
    tied, plain = (simulate(name, 4, model=each, cluster=SLOW) for each in (HEAD, less))
    for category in ("parameters", "optimizer"):
        rows, others = (trace.memory["category"] == category for trace in (tied, plain))
        assert tied.memory[rows] == plain.memory[others]
    for column in ("op", "stage", "size", "src", "dst", "start", "end"):
        assert (tied.messages[column] == plain.messages[column]).all()
    assert not violations(tied)


def test_its_gradient_is_held_from_the_last_stages_backward_on() -> None:
    """Free messages, forwards from 0 to 4: backwards begin at 4, 6, 8 and 10; all are summed at 12."""
    memory = simulate("multi-dp", 4, m=2, model=HEAD, steps=1).memory
    rows = (memory["category"] == "gradients") & (memory["device"] == 0)
    found = list(zip(memory["time"][rows].tolist(), memory["size"][rows].tolist(), strict=True))
    assert found == [(4, 10 + 60), (6, 70 + 40), (8, 110 + 30), (10, 140 + 40), (12, 0)]


def test_three_stages_may_share_a_tensor() -> None:
    tied = model(Tie(stages=(0, 1, 3), parameters=30))
    assert peaks(simulate("multi-dp", 4, m=2, model=tied), "parameters") == [240 - 60] * 2
    trace = simulate("interleaved-1f1b", 4, m=2, chunks=2, model=tied)
    assert peaks(trace, "parameters") == [140, 100 - 30]
    assert sums(trace) == [(-1, "0|1", 30)]
    assert not violations(trace)


def test_owners_of_sharded_states_have_a_copy_each() -> None:
    """Each reduction takes all of a shared gradient along: it waits for the backwards of both stages."""
    tied, apart = (simulate("zero-dp", 4, model=each, cluster=SLOW) for each in (HEAD, APART))
    for name in ("op", "stage", "size", "src", "dst"):
        assert sorted(tied.messages[name].tolist()) == sorted(apart.messages[name].tolist())
    assert peaks(tied, "optimizer") == [2 * own for own in PARAMETERS]
    assert peaks(tied, "parameters") == peaks(apart, "parameters")
    messages, tasks = tied.messages, tied.tasks
    reduced = (messages["op"] == "reduce") & (messages["stage"] == 3)
    backward = (tasks["kind"] == "B") & (tasks["stage"] == 0)
    for step in range(3):
        after = tasks["end"][backward & (tasks["step"] == step)].max()
        assert (messages["start"][reduced & (messages["step"] == step)] == after).all()
    # Devices hold one sum of the tensor's gradient, beside what else stages 3 and 2 have: 60 + 10, then 60 + 10 + 40.
    memory = tied.memory
    rows = (memory["category"] == "gradients") & (memory["device"] == 1)
    assert memory["size"][rows][:2].tolist() == [70, 110]
    assert not violations(tied)


# Messages


def test_the_copies_gradients_are_summed_after_the_step() -> None:
    """GPipe with one micro-batch: forwards take 4 s and backwards 8 s, and boundaries of one byte 6 x 0.55 s.

    So the last backward ends at 15.3 s. Two devices exchange 60 bytes in one round: 0.5 s, and 3 s at 20 B/s.
    """
    trace = simulate("gpipe", 4, m=1, model=HEAD, cluster=SLOW, steps=2)
    assert sums(trace) == [(-1, "0|3", 60)]
    messages, tasks = trace.messages, trace.tasks
    row = int(np.flatnonzero(messages["op"] == "all_reduce")[0])
    assert messages["start"][row] == pytest.approx(15.3)
    assert messages["end"][row] == pytest.approx(18.8)
    update = (tasks["kind"] == "U") & (tasks["step"] == 0)
    started = dict(zip(tasks["stage"][update].tolist(), tasks["start"][update].tolist(), strict=True))
    assert (started[0], started[3]) == pytest.approx((18.8, 18.8))
    assert started[2] < started[1] < 15.3  # which wait for no other device
    forward = (tasks["kind"] == "F") & (tasks["step"] == 1) & (tasks["stage"] == 0)
    assert tasks["start"][forward] == pytest.approx([18.8])


def test_with_replicas_one_sum_is_over_all_of_them() -> None:
    """The rest of the two stages is summed as any other stage is."""
    trace = simulate("1f1b", 4, m=4, replicas=2, model=HEAD)
    expected = [(-1, "0|3|4|7", 60), (0, "0|4", 40), (1, "1|5", 30), (2, "2|6", 40), (3, "3|7", 10)]
    assert sums(trace) == sums(trace, 1) == expected


def test_bidirectional_pipelines_sum_it_once() -> None:
    trace = simulate("chimera", 4, m=4, model=HEAD)
    expected = [(-1, "0|3", 60), (0, "0|3", 40), (1, "1|2", 30), (2, "1|2", 40), (3, "0|3", 10)]
    assert sums(trace) == expected


@pytest.mark.parametrize("contention", ["none", "fair"])
def test_each_of_several_tensors_is_summed_by_itself(contention: Contention) -> None:
    """In one piece and as messages; messages.csv has no stage for either."""
    tied = model(Tie(stages=(0, 3), parameters=30), Tie(stages=(0, 1, 3), parameters=20))
    trace = simulate("gpipe", 4, m=4, model=tied, cluster=SLOW, contention=contention)
    stages, op = trace.messages["stage"], trace.messages["op"]
    if contention == "none":
        assert sums(trace) == [(-1, "0|1|3", 20), (-1, "0|3", 30)]
    assert set(stages[(stages < 0) | (op == "all_reduce")].tolist()) == {-1}
    assert not violations(trace)
    assert trace.steady_state.period_is == ("certified" if contention == "none" else "measured")


def test_it_may_be_summed_before_the_step_ends() -> None:
    """Stages 1 and 3 of an interleaved pipeline are through before stage 0 is."""
    tied = model(Tie(stages=(1, 2), parameters=30))
    asked: dict[str, Any] = {"m": 2, "chunks": 2, "model": tied, "cluster": SLOW}
    late, early = (simulate("interleaved-1f1b", 4, **asked, reduce=when) for when in ("end", "last"))
    starts = [trace.messages["start"][trace.messages["stage"] == -1][0] for trace in (late, early)]
    tasks = early.tasks
    gives = (tasks["kind"] == "B") & np.isin(tasks["stage"], (1, 2)) & (tasks["step"] == 0)
    assert starts[1] == tasks["end"][gives].max() < starts[0]
    assert not violations(early)


@pytest.mark.parametrize("name", UNTIED)
def test_without_a_flush_stages_are_untied(name: str) -> None:
    """A run is that of a model in which each has a tensor of its own, and its summary says so."""
    tied, apart = (simulate(name, 4, model=each, cluster=SLOW, **UNTIED[name]) for each in (HEAD, APART))
    assert (tied.tasks, tied.messages, tied.memory) == (apart.tasks, apart.messages, apart.memory)
    assert tied.summary()["untied"] == [[0, 3]]
    assert "untied" not in apart.summary()
    assert not violations(tied)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*COUNTED, *UNTIED, "single-cdp", "multi-cdp", "zero-dp"]),
    stages=st.lists(st.integers(0, 3), min_size=2, max_size=4, unique=True).map(sorted),
    contention=st.sampled_from(["none", "fair"]),
    update=st.sampled_from([None, 0.25]),
)
def test_engines_agree_and_invariants_hold(
    name: str, stages: list[int], contention: Contention, update: float | None
) -> None:
    asked = COUNTED[name][0] if name in COUNTED else UNTIED.get(name, {})
    tied = model(Tie(stages=tuple(stages), parameters=30, gradients=20), gradients=25, update=update)
    traces = [simulate(name, 4, model=tied, cluster=SLOW, engine=engine, **asked) for engine in ("fast", "simpy")]
    assert (traces[0].tasks["start"] == traces[1].tasks["start"]).all()
    assert (traces[0].messages["end"] == traces[1].messages["end"]).all()
    run = traces[0]
    if contention != "none" and len(run.program.messages):
        run = simulate(name, 4, model=tied, cluster=SLOW, contention=contention, **asked)
    assert not violations(run)


# Models


def test_gpt2_has_as_many_parameters_as_published() -> None:
    gpt2 = presets.model("gpt2")
    assert GPT2 == 124_439_808
    assert gpt2.parameter_bytes == 2 * GPT2
    assert gpt2.tied == (Tie(stages=(0, 13), parameters=50_257 * 768 * 2, factored=(50_257 + 768) * 2),)


def test_a_tie_is_in_the_models_file(tmp_path: Path) -> None:
    HEAD.save(tmp_path / "head.toml")
    assert Model.load(tmp_path / "head.toml") == HEAD
    trace = simulate("gpipe", 4, m=4, model=HEAD)
    again = simulate(**trace.request)
    assert sums(again) == sums(trace) == [(-1, "0|3", 60)]


def test_groups_of_stages_keep_ties_and_count_within_a_group_once() -> None:
    """The four stages cost the same, so that two groups are the first two and the last two."""
    halves = HEAD.grouped(2)
    assert halves.size("parameters").tolist() == [130, 110]
    assert halves.tied == (Tie(stages=(0, 1), parameters=60, optimizer=120),)
    whole = HEAD.grouped(1)
    assert (whole.size("parameters").tolist(), whole.size("optimizer").tolist(), whole.tied) == ([180], [360], ())
    near = model(Tie(stages=(0, 1), parameters=30, gradients=30)).grouped(2)
    assert (near.size("parameters").tolist(), near.size("gradients").tolist()) == ([100, 110], [100, 110])
    assert not near.tied


@pytest.mark.parametrize(
    ("recipe", "factor"),
    [(Recipe(optimizer="momentum"), 1), (Recipe(optimizer="adam", mixed_precision=True), 6)],
)
def test_a_recipe_weighs_the_state_of_the_tensor_once(recipe: Recipe, factor: int) -> None:
    gpt2 = presets.model("gpt2")
    trained = apply_recipe(gpt2, recipe, 4)
    assert trained.tied[0].optimizer == factor * 50_257 * 768 * 2
    assert apply_recipe(gpt2, recipe, 1).stages[0].optimizer == factor * 2 * GPT2


def test_adafactor_keeps_rows_and_columns_of_the_tensor_once() -> None:
    gpt2 = presets.model("gpt2")
    rows = sum(stage.factored for stage in gpt2.stages) - (50_257 + 768) * 2
    assert apply_recipe(gpt2, Recipe(optimizer="adafactor"), 1).stages[0].optimizer == rows


def test_hosts_hold_the_state_of_the_tensor_once() -> None:
    """Adam in mixed precision keeps 12 bytes a parameter."""
    asked: dict[str, Any] = {"model": "gpt2", "cluster": "h100-node", "offload": "optimizer"}
    trace = simulate("multi-dp", 4, m=2, **asked)
    assert [host["bytes"] for host in trace.summary()["host_memory"]] == [12 * GPT2] * 2
    ends = simulate("gpipe", 4, m=2, **asked).summary()["host_memory"]
    assert sum(host["bytes"] for host in ends) == 12 * (GPT2 + 50_257 * 768)


def test_a_worker_holds_it_once() -> None:
    some, more = (worker_curve("gpt2", contents=contents) for contents in ("gradients", "constants"))
    assert set((more.size - some.size).tolist()) == {2 * GPT2}


# Models that ship


def test_seven_billion_parameters_do_not_fit_into_80_gb() -> None:
    """At the last stage's backward: 2 + 12 bytes a parameter and all activations; that stage's gradients, if zeroed."""
    options: dict[str, Any] = {"model": profiled("llama2-7b"), "cluster": "h100-node", "ignore_memory": True}
    one, zeroed = (
        measure(simulate("multi-dp", 8, **options, runtime=runtime)) for runtime in (None, "paper:gradients=zeroed")
    )
    last = 2 * (4 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 32_000 * 4096 + 4096)
    assert one.optimizer == 12 * LLAMA
    assert one.memory == 14 * LLAMA + one.activations  # the logits' gradient comes before all gradients of parameters
    assert zeroed.memory == one.memory + last
    assert zeroed.memory == pytest.approx(147.5e9, rel=1e-3)
    assert not one.fits
    plain = simulate(
        "multi-dp", 8, model=profiled("llama2-7b"), cluster="h100-node", optimizer="sgd", mixed_precision=False
    )
    assert measure(plain).optimizer == 0


# The command line


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(list(words)) == 0
    found = capsys.readouterr()
    return found.out, found.err


WORDS = ["compare", "multi-dp", "pipedream", "gpipe", "-n", "4", "--columns", "memory"]
WORDS += ["--model", "gpt2", "--cluster", "h100-node"]
ABOUT = (
    "gpt2, adam, mixed precision, 8 samples a micro-batch, bf16, h100-node; memory is with 68.16 MB of workspaces, "
    "without CUDA context and allocator reserve"
)
LINE = "tied stages 0 and 3 are untied in pipedream: steps are not flushed there, and each has a tensor of its own"


def test_a_table_says_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, *WORDS)
    assert out.splitlines()[-3:-1] == [ABOUT, LINE]
    assert f"{ABOUT}\\par\n{LINE}\\par\n" in printed(capsys, *WORDS, "--format", "latex")[0]
    assert len(printed(capsys, *WORDS, "--format", "csv")[0].splitlines()) == 4
    rows = json.loads(printed(capsys, *WORDS, "--format", "json")[0])
    assert [row.get("untied") for row in rows] == [None, [[0, 3]], None]
    assert {row["setting"] for row in rows} == {ABOUT.split(";")[0]}


def test_pictures_say_what_they_are_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Above bars and points, in titles, and where memory is drawn what it leaves out."""
    model, memory = ABOUT.split("; memory is ")
    for style in ("bars", "points"):
        printed(capsys, *WORDS, "--style", style, "-o", str(tmp_path / f"{style}.svg"))
        said = " ".join(read((tmp_path / f"{style}.svg").read_bytes()).said())
        assert ABOUT in said
        assert LINE in said
    asked = ["gpipe", *WORDS[4:6], *WORDS[-4:], "-o"]
    printed(capsys, "plot", "memory", *asked, str(tmp_path / "memory.svg"))
    said = " ".join(read((tmp_path / "memory.svg").read_bytes()).said())
    assert f"gpipe, n = 4, dp, {model}" in said
    assert f"Held by all devices together, {memory.partition(', ')[2]}" in said
    printed(capsys, "timeline", *asked, str(tmp_path / "gantt.svg"))
    assert f"gpipe, n = 4, dp, {model}" in " ".join(read((tmp_path / "gantt.svg").read_bytes()).said())


def test_what_ships_is_undone_by_options(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, *WORDS, "--optimizer", "sgd", "--no-mixed-precision")
    assert "\ngpt2, sgd, no optimizer state, 8 samples a micro-batch, bf16, h100-node; " in out


def test_in_slots_there_is_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(printed(capsys, "compare", "multi-dp", "-n", "3")[0].splitlines()) == 3


def test_a_run_says_that_stages_are_untied(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["simulate", "pipedream", "-n", "4", "--model", "gpt2", "--cluster", "h100-node", "-o"]
    _, err = printed(capsys, *words, str(tmp_path / "traces"))
    assert LINE in err
    _, err = printed(capsys, *(word.replace("pipedream", "1f1b") for word in words), str(tmp_path / "flushed"))
    assert "untied" not in err


def test_models_are_listed_with_their_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, "models")
    assert {line.split()[0]: " 124.4 M  " in line for line in out.splitlines()[2:]} == {
        name: name == "gpt2" for name in presets.preset_names("models")
    }
    rows = {row["name"]: row for row in json.loads(printed(capsys, "models", "--format", "json")[0])}
    assert (rows["gpt2"]["parameter_count"], rows["gpt2"]["parameters_bytes"]) == (GPT2, 2 * GPT2)
    assert rows["resnet50"]["parameter_count"] == 25_557_032  # torchvision's table of models


# Bad input

BAD: dict[str, tuple[str, str]] = {
    "a stage that is not": (
        'stages = [0, 3]\nparameters = "1 kB"',
        "stages: stage 3 does not exist; the model's stage",
    ),
    "a stage before the first": ('stages = [-1, 2]\nparameters = "1 kB"', "stages: stage -1 does not exist"),
    "stages that differ": (
        'stages = [0, 2]\nparameters = "2 kB"',
        "parameters: stages [0, 2] differ in size: stage 2 has 1,000 bytes of the 2,000 that are tied; give what all",
    ),
    "states that differ": (
        'stages = [0, 2]\nparameters = "1 kB"\noptimizer = "1 kB"',
        "optimizer: stages [0, 2] differ in size: stage 0 has 0 bytes of the 1,000 that are tied",
    ),
    "gradients that differ": (
        'stages = [0, 2]\nparameters = "1 kB"\ngradients = "3 kB"',
        "gradients: stages [0, 2] differ in size: stage 0 has 2,000 bytes of the 3,000",
    ),
    "more than there is": (
        'stages = [1, 2]\nparameters = "1 kB"\n[[tied]]\nstages = [0, 1]\nparameters = "1 kB"',
        "parameters: stages [0, 1] differ in size: stage 1 has 0 bytes",
    ),
    "one stage": ('stages = [1]\nparameters = "1 kB"', "stages: [1] must be at least two stages"),
    "a stage twice": ('stages = [1, 1]\nparameters = "1 kB"', "stages: [1, 1] must be at least two stages"),
}


@every_row(("tie", "problem"), BAD.values())
def test_bad_ties_are_refused(tie: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, stage = tmp_path / "bad.toml", '[[stages]]\nforward = "1 s"\nbackward = "2 s"\n'
    sizes = ("2 kB", "1 kB", "1 kB")
    path.write_text(f"[[tied]]\n{tie}\n" + "".join(f'{stage}parameters = "{size}"\n' for size in sizes))
    assert main(["simulate", "gpipe", "--model", str(path), "-o", str(tmp_path / "traces")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert line.startswith(f"cdpsim: error: {path}: $.tied[")
