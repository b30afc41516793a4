"""Hugging Face's own training steps on a GPU: a profile, made without one, has their peak and reserved memory."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import validation.profile.hugging_face as hugging_face
from cdpsim import RequestError
from cdpsim.cluster import Workspace
from cdpsim.presets import find_cluster
from tests.validation.measured_tables import PAGE, RESULTS
from validation.profile.caching import MIB
from validation.profile.hugging_face import (
    HuggingFaceStep,
    describe_steps,
    load_steps,
    measure_or_compare,
    predict_step,
)
from validation.profile.whole import WholeStep

FILE = RESULTS / "hugging-face-cuda-2026-11-26.json"
STEPS = load_steps(str(FILE)).steps
every_step = pytest.mark.parametrize("step", STEPS, ids=[f"{step.name}-{step.dtype}-{step.autocast}" for step in STEPS])
LARGEST_ERROR = {"float32": 0.0, "bfloat16": 0.002, "autocast": 2e-8}


@pytest.mark.slow
@every_step
def test_a_profile_has_the_peak_and_what_is_reserved(step: HuggingFaceStep) -> None:
    """To the byte in float32; under autocast but for 16 B a layer. No rule of the allocator is fitted to a step."""
    found, page = predict_step(step), PAGE.read_text(encoding="utf-8")
    assert f"  {found.peak_activations:,} " in page
    assert f"  {found.reserved // MIB:,} " in page
    largest = LARGEST_ERROR["autocast" if step.autocast else step.dtype]
    assert abs(found.peak_activations / step.activations - 1) <= largest
    assert abs(found.reserved / step.reserved - 1) <= max(largest, 0.006)


@every_step
def test_what_was_there_before_is_parameters_and_adam(step: HuggingFaceStep) -> None:
    """And tokens of eight bytes, 64 frequencies of a Llama, and what libraries keep for good, as the cluster says."""
    numbers = 3 * step.parameters * (2 if step.dtype == "bfloat16" else 4)
    others = 8 * step.batch * step.length + 4 * 64 * (step.config["model_type"] == "llama")
    for name in ("h100-node", "h100-nodes"):
        (devices,) = find_cluster(name).devices
        assert devices.workspace == Workspace(kept=step.before - numbers - others)


def test_the_page_of_results_has_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row what was measured: predictions take half a minute, and are looked for where they are made."""
    lines = [re.split(r"\s{2,}", line) for line in PAGE.read_text(encoding="utf-8").splitlines()]
    shown = [[*row[:5], row[7], row[10]] for row in lines if len(row) == 11]
    monkeypatch.setattr(hugging_face, "predict_step", lambda step: WholeStep(step.activations, 0, step.reserved))
    for line in describe_steps(load_steps(str(FILE))).splitlines():
        cells = re.split(r"\s{2,}", line)
        assert [*cells[:5], cells[7], cells[10]] in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "FILE: give"),
        (["measure", "new.json"], "measure: needs a GPU"),
        ([str(RESULTS / "peers-cpu-2026-11-23.json")], "is no file of measured steps"),
    ],
)
def test_bad_requests_are_one_line(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError) as caught:
        measure_or_compare(arguments)
    assert says in str(caught.value)
