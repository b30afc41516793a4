"""Memory of torch's own runtimes by declared behaviours: simulated peaks are those that were measured.

The peaks were measured by torch 2.13.0 on four ranks (CPU, gloo), from before the stages were made, above the
parameters: a transformer of width 256, length 64, 4 heads, batch 8, float32, SGD, eight micro-batches.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from cdpsim import Model, simulate
from validation.profile.command import profile
from validation.profile.footprints import with_unit_times

M = 8
BOUNDARY = 8 * 64 * 256 * 4  # bytes of an activation
STAGE = 4 * (12 * 256**2 + 10 * 256)  # bytes of a block's parameters: six matrices, biases and norms
LOSSES = 4 * M  # bytes of the losses that torch keeps to the step's end, which nothing simulates

MEASURED = {
    "1f1b": [48_835_584, 40_954_880, 32_549_888, 27_814_948],
    "gpipe": [78_775_296, 78_775_296, 78_775_296, 79_299_620],
    "interleaved-1f1b": [123_409_408, 109_220_864, 94_508_032, 80_319_524],
}
DDP = 50_439_176
FSDP2, IN_PLACE, FORWARD = 47_292_440, 47_283_224, 44_660_752  # by gloo, without its copies, and in the last forward
MESH = 4 * 4  # bytes of the ranks' numbers, which FSDP2's device mesh has
NUMBER = 4  # bytes: a loss, or its gradient


@cache
def block_model(n: int) -> Model:
    """Stages of one block each, profiled; a backward takes two slots."""
    model = profile("transformer", n, batch=8, width=256, length=64, heads=4).model
    return with_unit_times(model, split=True)


def peaks(schedule: str, runtime: str) -> list[int]:
    """Each device's simulated peak above its parameters; with those of a shard, where parameters are sharded."""
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    options: dict[str, Any] = {} if schedule in ("multi-dp", "zero-dp") else {"m": M}
    options |= {"chunks": chunks} if chunks > 1 else {}
    run = simulate(schedule, model=block_model(4 * chunks), runtime=runtime, **options)
    stages = {"multi-dp": 4, "zero-dp": 0}.get(schedule, chunks)
    return [peak - stages * STAGE for peak in run.peaks[:, -1].tolist()]


def less(schedule: str, *behaviours: str) -> list[float]:
    """By how many boundaries each device's peak is lower without behaviours of torch's."""
    without = peaks(schedule, f"torch:{','.join(behaviours)}")
    return ((np.array(peaks(schedule, "torch")) - without) / BOUNDARY).tolist()


@pytest.mark.slow
def test_the_parameters_of_a_stage() -> None:
    assert block_model(4).size("parameters").tolist() == [STAGE] * 4 == [3_155_968] * 4


@pytest.mark.parametrize("schedule", MEASURED)
def test_pipelines_peak_where_torchs_do(schedule: str) -> None:
    """To the byte, but for the losses on the last device."""
    apart = [measured - peak for measured, peak in zip(MEASURED[schedule], peaks(schedule, "torch"), strict=True)]
    assert apart == [0, 0, 0, LOSSES]


def test_data_parallelism_peaks_where_torchs_does() -> None:
    """To the byte, but for a loss: with a bucket for each gradient, and a target that its caller has."""
    assert [DDP - peak for peak in peaks("multi-dp", "torch")] == [4] * 4
    assert peaks("multi-dp", "torch:gradient_buckets=none") == [DDP - 4 - 4 * STAGE] * 4


def test_sharded_data_parallelism_peaks_where_torchs_does() -> None:
    """To the byte, but for numbers: in the last stage's backward, which has what the one before it needs, too.

    Without what is gathered ahead the peak is in the last forward, before the loss.
    """
    assert [FSDP2 - peak for peak in peaks("zero-dp", "torch")] == [MESH + 2 * NUMBER] * 4
    assert [IN_PLACE - peak for peak in peaks("zero-dp", "torch:collective_copies=no")] == [MESH + NUMBER] * 4
    forward = peaks("zero-dp", "torch:backward_prefetch=no,collective_copies=no")
    assert [FORWARD - peak for peak in forward] == [MESH] * 4


@pytest.mark.parametrize(("zero", "measured"), [(0, DDP - NUMBER), (3, FSDP2 - MESH - 2 * NUMBER)])
def test_data_ranks_peak_where_torchs_do(zero: int, measured: int) -> None:
    """Of `dp` with a stage of ZeRO: to the byte, but for the same numbers."""
    early = {} if zero == 0 else {"prefetch": 0}
    run = simulate("dp", model=block_model(4), zero=zero, replicas=4, runtime="torch", **early)  # type: ignore[arg-type]
    above = STAGE * 4 if zero == 0 else 0
    assert [peak - above for peak in run.peaks[:, -1].tolist()] == [measured] * 4


def test_each_behaviour_of_1f1b_weighs_what_its_closed_form_says() -> None:
    """In boundaries, where 4 - j forwards of device j are in flight at its peak, and one receives a gradient."""
    flight = [4, 3, 2, 1]
    inner = [0, *((M - flight[j]) + (M - 1) for j in (1, 2)), 0]
    assert less("1f1b", "static_receives=no", "kept_losses=no") == [M - 1, inner[1], inner[2], M - 1]
    assert less("1f1b", "kept_outputs=no") == [4, 3, 2, 0]
    assert less("1f1b", "sends=until-sent") == [1, 2, 2, 1]  # an output but on the last, a gradient but on the first
    assert less("1f1b", "returned_outputs=no") == [0, 0, 0, M - 1]
    assert less("1f1b", "returned_outputs=no", "kept_outputs=no")[3] == M  # the output in the backward, too
    assert less("1f1b", "whole_batch=no") == [M - 4, 0, 0, M - 1]
    assert less("1f1b", "gradients=zeroed") == [0] * 4


def test_losses_hold_what_static_buffers_would() -> None:
    """Without static receives, inputs of the last stage stay with their losses: as many as buffers had been."""
    assert less("1f1b", "static_receives=no") == [M - 1, 12, 13, 0]


def test_each_behaviour_of_gpipe_weighs_what_its_closed_form_says() -> None:
    """At the peak, in the first backward, all forwards are in flight."""
    assert less("gpipe", "static_receives=no", "kept_losses=no") == [M - 1] * 3 + [0]
    assert less("gpipe", "kept_outputs=no", "sends=until-sent") == [M] * 3 + [0]
    assert less("gpipe", "returned_outputs=no", "kept_outputs=no") == [0, 0, 0, 1]
    assert less("gpipe", "whole_batch=no") == [0] * 4
    assert less("gpipe", "gradients=zeroed") == [-STAGE / BOUNDARY] * 4


def test_each_behaviour_of_an_interleaved_pipeline_weighs_what_torchs_does() -> None:
    """As torch's peaks fell without it, to one boundary: when a message has been sent is not the same there."""
    for behaviours, measured in (
        (("static_receives=no", "kept_losses=no"), [5 + 15 - 1, 7 + 15, 9 + 15 - 1, 11 + 8 - 2]),
        (("kept_outputs=no", "sends=until-sent"), [11 + 5 + 4, 9 + 7 + 7, 7 + 9 + 9, 4 + 4 + 11]),
        (("sends=until-sent",), [5 + 4, 7 + 7, 9 + 9, 4 + 11]),
        (("returned_outputs=no",), [0, 0, 0, 7]),
        (("whole_batch=no",), [0, 0, 0, 7]),
    ):
        assert less("interleaved-1f1b", *behaviours) == pytest.approx(measured, abs=1)


def test_without_behaviours_peaks_are_those_of_the_schedule() -> None:
    """The paper's account, as the notes on torch have it; but with gradients one by one, and targets that stay."""
    target = BOUNDARY
    assert peaks("1f1b", "paper:gradients=zeroed") == [40_446_976, 32_566_272, 24_161_280, 15_756_292 + target]
    assert peaks("gpipe", "paper:gradients=zeroed") == [74_066_944] * 3 + [81_406_980 + target]
    # Eight passes in flight at the first backward, without gradients; or seven at the second one, with them.
    first, second = 74_066_944 - STAGE, 74_066_944 - (8_404_992 - BOUNDARY) - BOUNDARY
    assert peaks("gpipe", "paper")[:3] == [max(first, second)] * 3
