"""Everything public shows itself in one informative line."""

import numpy as np
import pytest

import cdpsim
from cdpsim import Cluster, Model, Request, Stage, Tie, simulate
from cdpsim.request.sharing import accepts
from tests.helpers.every_row import every_row
from tests.helpers.hostile_names import HOSTILE_NAME

RUN = simulate("1f1b", 4, m=8, steps=1, model="gpt2", cluster="a100-nodes", slow={3: 2})
HOSTILE = Model(name=HOSTILE_NAME, stages=[Stage(name=HOSTILE_NAME, forward=1.0, backward=2.0)])  # type: ignore[arg-type]
SHOWN = {
    "comparison": (cdpsim.compare("gpipe", "1f1b", n=4), ["2 runs", "gpipe, 1f1b"]),
    "run": (RUN, ["1f1b", "n=4", "m=8", "gpt2", "a100-nodes", "4 devices", " ms"]),
    "slots": (simulate("single-dp", 2), ["single-dp", "1 device,", "12 slots"]),
    "trace": (RUN.trace, ["1f1b", "rows of tasks"]),
    "tasks": (RUN.tasks, ["68 rows", "micro_batch"]),
    "request": (RUN.request, ["1f1b", "n=4", "gpt2", "a100-nodes"]),
    "program": (RUN.program, ["1f1b", "68 tasks", "4 devices"]),
    "costs": (RUN.costs, ["1f1b", " s of "]),
    "steady state": (RUN.steady_state, ["1f1b", "certified", " s,"]),
    "model": (RUN.request.model, ["gpt2", "4 stages"]),
    "cluster": (RUN.request.cluster, ["a100-nodes", "80 GB"]),
    "schedule": (
        RUN.request.schedule,
        [
            "1f1b",
            "in turn",
        ],
    ),
    "rule": (RUN.request.rule, ["dp"]),
    "order": (RUN.request.schedule.order, ["1f1b"]),
    "placement": (RUN.request.schedule.placement, ["as listed"]),
    "stage": (Stage(name="head", forward="2 TFLOP", backward=4.0), ["'head'", "'2 TFLOP'", "'4 s'"]),  # type: ignore[arg-type]
    "tie": (Tie(stages=(0, 3), parameters=10), ["0, 3", "'10 B'"]),
    "slow": (RUN.request.disorder.slow[0], ["device=3", "factor=2"]),
    "error": (cdpsim.RequestError("n", "is 0"), ["n: is 0"]),
    "of a bad name": (HOSTILE, ["1 stage"]),
    "stage of a bad name": (HOSTILE.stages[0], ["forward='1 s'"]),
    "run of a bad name": (simulate("pp-cdp", model=HOSTILE), ["pp-cdp"]),
}


@every_row("what", SHOWN)
def test_a_line_says_what_it_is(what: str) -> None:
    shown, words = SHOWN[what]
    line = repr(shown)
    assert line.isprintable()
    assert " at 0x" not in line
    assert len(line) <= 200
    assert not [word for word in words if word not in line]


def test_a_stage_s_line_makes_it_again() -> None:
    """Unless it has more shapes of parameters than a line can show."""
    stage = Model.load("vit-b16").without_curves().stages[-1]
    assert eval(repr(stage), {"Stage": Stage}) == stage


@pytest.mark.parametrize("name", cdpsim.schedules())
def test_a_saved_trace_equals_its_run(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("trace")
    run = simulate(name, 4, m=8 if accepts(cdpsim.SCHEDULES[name], "m") else None)
    run.save(folder / "saved")
    assert cdpsim.load(folder / "saved") == run == run.trace
    assert run != simulate(name, 2, m=4 if accepts(cdpsim.SCHEDULES[name], "m") else None)


def test_traces_differ_where_a_summary_or_a_table_does() -> None:
    same = RUN.trace
    tables = (same.tasks, same.messages, same.memory)
    assert cdpsim.Trace(*tables, same.summary()) == same
    assert cdpsim.Trace(*tables, same.summary() | {"bubble": 0.5}) != same
    later = {**same.tasks, "end": same.tasks.end + 1}
    assert cdpsim.Trace(later, same.messages, same.memory, same.summary()) != same
    assert RUN != "1f1b"


def test_metrics_are_those_of_the_summary() -> None:
    summary = RUN.summary()
    for name in ("makespan", "bubble", "devices", "peak_memory"):
        assert getattr(RUN, name) == getattr(RUN.trace, name) == summary[name]
    with pytest.raises(cdpsim.RequestError, match="bubble"):
        _ = cdpsim.Trace(RUN.tasks, RUN.messages, RUN.memory).bubble


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "multi-cdp", "mp-cdp", "zero-dp"])
@pytest.mark.parametrize("real", [False, True])
def test_a_critical_path_ends_last_and_has_no_gap_but_for_messages(name: str, real: bool) -> None:
    """In slots messages take no time: where no task waits for its release, the path is as long as the run."""
    run = simulate(name, 4, steps=2, **({"model": "gpt2", "cluster": "a100-nodes"} if real else {}))  # type: ignore[arg-type]
    path = run.critical_path()
    assert path.end[-1] == run.makespan
    assert (path.start[1:] >= path.end[:-1] * (1 - 1e-12)).all()
    if not real and name in ("gpipe", "zb-h1", "zero-dp"):
        assert (path.end - path.start).sum() == run.makespan
        assert np.array_equal(path.start[1:], path.end[:-1])


def test_models_and_clusters_are_loaded_by_name() -> None:
    assert [Model.load(name).name for name in cdpsim.models()] == cdpsim.models()
    assert [Cluster.load(name).name for name in cdpsim.clusters()] == cdpsim.clusters()
    for load in (Model.load, Cluster.load):
        with pytest.raises(cdpsim.RequestError, match="unknown"):
            load("gpt-22")
    with pytest.raises(cdpsim.RequestError, match="did you mean 'gpt2'"):
        Model.load("gtp2")


def test_stages_in_groups_have_the_names_of_the_first_and_the_last() -> None:
    names = ["embedding", "block", "block", "block", "head"]
    model = Model(stages=tuple(Stage(name=name, forward=1.0, backward=2.0) for name in names))
    assert [stage.name for stage in model.grouped(2).stages] == ["embedding – block", "block – head"]
    assert [stage.name for stage in model.grouped(5).stages] == names
    assert Model.from_builtins(model.table(), "again") == model


def test_a_misspelt_keyword_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="'stpes'; did you mean 'steps'"):
        Request("gpipe", 4, stpes=3)  # type: ignore[call-arg]
