"""The reference page of report files has each field that the harness writes, and no other."""

from collections.abc import Iterator

import msgspec
import pytest

pytest.importorskip("torch")

from tests.helpers.field_tables import require_fields
from validation.learn import limits
from validation.learn import results as learn
from validation.report import schema

FORMS: dict[str, type[msgspec.Struct]] = {
    "A report: `replay -o FILE.json`": schema.Report,
    "The request of a report": schema.ReplayRequest,
    "`parameters`": schema.ParameterComparison,
    "`parameters.nearest`": schema.NearestRule,
    "`memory`": schema.Memory,
    "`memory.devices`": schema.DeviceMemory,
    "`memory.devices.categories`": schema.Amount,
    "`memory.devices.parts_at`": schema.Divergence,
    "`memory.total`, `memory.together`": schema.Total,
    "`memory.curve`": schema.Curve,
    "`messages`": schema.MessageCount,
    "`messages.differences`": schema.MessageDifference,
    "`time`": schema.Time,
    "`time.devices`": schema.DeviceTime,
    "`lives`": schema.LifeDifference,
    "`allocator`": schema.AllocatorComparison,
    "`allocator.processes`": schema.Account,
    "`allocator.processes.remainders`": schema.Remainder,
    "Rounds that ranks find: `replay --live -o FILE.json`": schema.LiveReport,
    "`rounds`": schema.LiveRound,
    "A battery: `battery -o FILE.json`": schema.Battery,
    "`trials`": schema.TrialResult,
    "A calibration: `calibrate -o FILE.toml`": schema.Calibration,
    "`one_way`, `both_ways`": schema.Transfers,
    "`points`": schema.Point,
    "`fit`": schema.Errors,
    "`collectives`": schema.Collective,
    "`compute`": schema.Compute,
    "`tasks`": schema.Task,
    "`kernels`": schema.KernelFit,
    "`overlap`": schema.OverlapTimes,
    "`operations`": schema.OperationTime,
    "What was learnt: `learn -o DIR`": learn.Learned,
    "`lags`": learn.ScheduleLags,
    "`curves`": learn.LearningCurve,
    "`answers`": learn.RateAnswer,
    "Limits of the rate: `learn --limits -o DIR`": limits.FoundLimits,
    "`limits`": limits.Limit,
    "Peers: `peers -o FILE.json`": schema.PeersReport,
    "`peers`": schema.PeerReport,
    "`peers.request`": schema.PeerRequest,
    "`peers.devices`": schema.DevicePeak,
    "`peers.devices.simulated`": schema.SimulatedMemory,
    "`peers.messages`": schema.Messages,
    "`peers.time`": schema.PeerTime,
}


def test_the_page_has_every_field() -> None:
    require_fields("report-files.md", FORMS)


def written_forms() -> Iterator[type[msgspec.Struct]]:
    """All types of the files, but the one that only says that no other fields are allowed."""
    for module in (schema, learn, limits):
        for form in vars(module).values():
            if isinstance(form, type) and issubclass(form, msgspec.Struct) and form.__module__ == module.__name__:
                yield form


def test_every_form_is_on_the_page() -> None:
    elsewhere = {form.__name__ for form in set(written_forms()) - set(FORMS.values())}
    assert elsewhere == {"_Form"}
