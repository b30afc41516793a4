"""Steps that others measured: the fit sees nothing that it is held against, and the page of results shows all."""

import re
from math import isclose
from pathlib import Path
from statistics import fmean

import pytest
from msgspec.structs import replace

from cdpsim import RequestError
from cdpsim.request.options import Rendezvous
from validation.profile.published import (
    FITTED_ON,
    ComparedStep,
    Machine,
    MeasuredStep,
    PublishedSteps,
    bare_step,
    compare_steps,
    fit_machine,
    load_published,
    print_comparison,
    role_of,
    simulated_step,
    stages_of,
)

PROJECT = Path(__file__).parent.parent
FILE = PROJECT / "validation" / "results" / "sailor-2025.json"
PAGE = (PROJECT / "docs" / "results.md").read_text(encoding="utf-8")
MADE_UP = Machine(latency=1e-4, bandwidth=2e10, launch=2e-4)


@pytest.fixture(scope="module")
def published() -> PublishedSteps:
    return load_published(FILE)


@pytest.fixture(scope="module")
def compared(published: PublishedSteps) -> list[ComparedStep]:
    return compare_steps(published)


def ring(k: int, size: float, machine: Machine) -> float:
    """2(k-1) rounds, each with a k-th of the bytes."""
    return 2 * (k - 1) * (machine.latency + size / k / machine.bandwidth)


def is_alone(run: MeasuredStep) -> bool:
    """Whether the fit may see a run."""
    return run.gpu == FITTED_ON and len(run.layers_per_stage) == 1


def test_all_layers_of_a_model_are_in_the_stages_of_each_run(published: PublishedSteps) -> None:
    """With the embedding and the head; and all micro-batches in the global batch."""
    for run in published.runs:
        assert sum(run.layers_per_stage) == published.models[run.model].layers + 2
        assert run.micro_batches * run.micro_batch * run.data == run.global_batch


def test_parameters_are_those_of_megatron(published: PublishedSteps) -> None:
    """12h² + 7h of a layer are split, 6h are copied; a GPT-2 vocabulary is padded to a multiple of 128 ranks."""
    for name, sizes in published.models.items():
        h = sizes.width
        for ranks, (embedding, layer, head) in ((int(t), counts) for t, counts in sizes.parameters.items()):
            words = -(-50257 // (128 * ranks)) * 128
            assert layer == (12 * h * h + 7 * h) // ranks + 6 * h
            assert embedding == (words + sizes.sequence) * h
            assert head == 2 * h + (words * h if name == "OPT-350" else 0)


def test_the_fit_finds_the_machine_of_reductions_again(published: PublishedSteps) -> None:
    def reduction(run: MeasuredStep) -> float:
        size = sum(stage.parameters for stage in stages_of(published, run))
        return MADE_UP.launch * sum(run.layers_per_stage) + ring(run.data, size, MADE_UP)

    runs = tuple(replace(run, reduction=reduction(run)) if is_alone(run) else run for run in published.runs)
    assert fit_machine(replace(published, runs=runs)) == pytest.approx(MADE_UP)


def test_the_fit_sees_only_reductions_of_runs_of_one_stage(published: PublishedSteps) -> None:
    """No step, no time of a layer, no other run."""
    runs = [
        replace(run, step=1e9) if is_alone(run) else replace(run, step=1e9, reduction=1e9) for run in published.runs
    ]
    times = [replace(each, layer=(1.0, 1.0), update=1.0) for each in published.profiles]
    assert fit_machine(replace(published, runs=tuple(runs), profiles=tuple(times))) == fit_machine(published)
    assert sum(map(is_alone, published.runs)) == 4


def test_a_gap_of_each_task_would_be_below_zero(compared: list[ComparedStep]) -> None:
    """As the page says: fitted to the steps of one stage by least squares of their relative errors."""
    alone = [step for step in compared if step.role == "fitted"]
    tasks = [2 * step.run.micro_batches / step.run.step for step in alone]
    assert sum(-step.error * weight for step, weight in zip(alone, tasks, strict=True)) < 0
    (shortest,) = (step for step in alone if step.run.micro_batch == 1)
    assert isclose(shortest.bare - shortest.run.reduction, 32 * 0.0825, rel_tol=1e-3) and shortest.error > 0.1


def test_a_step_of_two_stages_is_its_closed_form(published: PublishedSteps) -> None:
    """The last stage is busy without a pause: it receives, computes and sends each micro-batch, one after another."""
    machine = fit_machine(published)
    for run in published.runs:
        if run.gpu != FITTED_ON or run.stages != 2:
            continue
        first, last = stages_of(published, run)
        f, b, f_last, b_last, update = (
            float(x) for x in (first.forward, first.backward, last.forward, last.backward, first.update or 0)
        )
        assert f + b < f_last + b_last
        around, layers = f + b, run.layers_per_stage[0]
        bare = around + run.micro_batches * (f_last + b_last) + update
        assert isclose(bare_step(published, run), bare + run.reduction, rel_tol=1e-9)
        message = machine.latency + first.boundary / machine.bandwidth
        reduced = ring(run.data, first.parameters, machine) + machine.launch * layers
        step = bare + 2 * message * run.micro_batches + reduced
        assert isclose(simulated_step(published, run, machine), step, rel_tol=1e-9)


def test_steps_of_two_stages_are_met(compared: list[ComparedStep]) -> None:
    """Of all nine on GH200 cards the mean error is at most 4 %, and each at most 8 %."""
    errors = [abs(step.error) for step in compared if step.role == "held"]
    assert len(errors) == 9
    assert fmean(errors) <= 0.04
    assert max(errors) <= 0.08


def test_the_page_says_what_other_exchanges_come_to(published: PublishedSteps) -> None:
    """In the order of its sentence."""
    machine, held = fit_machine(published), [run for run in published.runs if role_of(run) == "held"]
    ways: tuple[tuple[str, Rendezvous | None], ...] = (
        ("none", None),
        ("none", "megatron"),
        ("none", "torch"),
        ("full", None),
    )
    means = [
        fmean(100 * abs(simulated_step(published, run, machine, overlap, rendezvous) / run.step - 1) for run in held)
        for overlap, rendezvous in ways
    ]
    sentence = re.search(
        r"the mean is (\S+) % as above, (\S+) % if both ends wait.*?and (\S+) % if messages", PAGE, re.DOTALL
    )
    assert sentence is not None
    alone, waiting, free = sentence.groups()
    assert [f"{mean:.1f}" for mean in means] == [alone, waiting, waiting, free]


def test_messages_explain_deeper_pipelines(compared: list[ComparedStep]) -> None:
    """Their steps, to which nothing is fitted, are nearer than layer times with the published reductions are."""
    deeper = [step for step in compared if step.role == "deeper"]
    assert len(deeper) == 10
    assert fmean(abs(step.error) for step in deeper) < fmean(abs(step.bare_error) for step in deeper) / 2


def test_the_page_of_results_shows_what_the_module_prints(capfd: pytest.CaptureFixture[str]) -> None:
    assert print_comparison([str(FILE)]) == 0
    assert capfd.readouterr().out in PAGE
    with pytest.raises(RequestError, match="FILE: give one file of measurements, such as"):
        print_comparison([])


def test_what_is_no_file_of_measurements_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"source": "a"}')
    with pytest.raises(RequestError, match=re.escape("other.json: is no file of measurements (")):
        load_published(other)
