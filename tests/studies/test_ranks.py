"""Comparisons and plans that count ranks, and utilizations beside the formulas of papers."""

from typing import Any

import pytest

from cdpsim import Cluster, Comparison, Model, Request, RequestError, compare, evaluate, plan, simulate
from cdpsim.runs.ranks import rates_of_run
from cdpsim.studies.compare import overview
from cdpsim.studies.published import PublishedRow, load_published
from tests.helpers.split_layers import LAYERS, MODEL, B, H, S, T, cluster

# Of Korthikanti et al. 2022, table 5: with sequence parallelism and selective recomputation.
KORTHIKANTI = [row for row in load_published("korthikanti-table-5") if row.quantity == "mfu"]
SMALL, NODES = Model.from_builtins(MODEL, "model"), Cluster.from_builtins(cluster(), "cluster")
LENGTH, VOCABULARY, PEAK = 2048, 51_200, 312e12


def at_published_step(row: PublishedRow, **options: Any) -> tuple[dict[str, Any], Request, float]:
    """The rates of a run whose step takes as long as the published one, and what a rank does in it: B s L h^2."""
    request = Request(**row.request | options)
    model, ranks = request.model, 8 * request.shape.n // request.shape.chunks
    assert row.at and model.layers and model.samples
    micro_batches = request.shape.m / row.at
    size = micro_batches * model.samples * LENGTH * model.layers.layers * model.layers.width**2 / ranks
    return rates_of_run(request, micro_batches, ranks // 8), request, size


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: row.row)
def test_utilization_is_that_of_the_formulas(row: PublishedRow) -> None:
    """Appendix A: 72 B L s h^2 (1 + s/6h + V/12Lh) FLOP of a step, and of hardware s/3h in place of s/6h.

    The core of attention computed again is a forward of it, s/18h, which the FLOP of a rank have; its HFU has three.
    """
    rates, request, size = at_published_step(row)
    shape = request.model.layers
    assert shape is not None
    core, head = LENGTH / shape.width, VOCABULARY / (12 * shape.layers * shape.width)
    assert rates["mfu"] == pytest.approx(72 * size * (1 + core / 6 + head) / PEAK, rel=1e-9)
    assert rates["flops"] == pytest.approx(72 * size * (1 + 2 * core / 9 + head), rel=1e-9)
    assert rates["hfu"] == pytest.approx(72 * size * (1 + core / 3 + head) / PEAK, rel=1e-9)
    assert request.model.mesh.tensor == 8


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: row.row)
def test_flops_of_a_rank_are_published(row: PublishedRow) -> None:
    """Narayanan et al. 2021, equation 3: 96 B s L h^2 (1 + s/6h + V/16Lh) with each layer computed again."""
    rates, request, size = at_published_step(row, recompute="layer", sequence=False)
    shape = request.model.layers
    assert shape is not None
    core, head = LENGTH / shape.width, VOCABULARY / (16 * shape.layers * shape.width)
    assert rates["flops"] == pytest.approx(96 * size * (1 + core / 6 + head), rel=1e-9)
    assert rates["hfu"] == pytest.approx(rates["flops"] / PEAK, rel=1e-12)
    assert rates["per_device"] == pytest.approx(size / shape.layers / shape.width**2, rel=1e-12)


def test_copies_and_padding_are_no_use_of_a_model() -> None:
    """Two heads of keys and values on four ranks, and 1,000 rows of vocabulary of which 1,024 are computed."""
    shape = {**MODEL["layers"], "key_value_heads": 2, "vocabulary": 1000}
    asked: dict[str, Any] = {"m": 1, "model": {**MODEL, "layers": shape}, "cluster": cluster()}
    one, four = (evaluate("dp", 1, **asked, tensor=tensor) for tensor in (1, T))
    assert one.mfu and four.mfu and one.hfu and four.hfu
    assert one.mfu * float(one.step) == pytest.approx(four.mfu * float(four.step) * T, rel=1e-12)
    added = 6 * B * S * (LAYERS * H * 2 * 2 * (H // 8) + H * 24)
    computed = four.hfu * float(four.step) * T - one.hfu * float(one.step)
    assert computed * 1e12 == pytest.approx(added, rel=1e-9)


def compared(**options: Any) -> Comparison:
    """Schedules on eight ranks."""
    asked: dict[str, Any] = {"devices": 8, "batch": 16, "model": MODEL, "cluster": cluster(), "tensor": [1, 2, 4]}
    return compare(["dp", "1f1b"], **asked | options)


def test_devices_are_ranks() -> None:
    """T ranks are one device. They have the same samples: 16 are 8 micro-batches of a pipeline, whatever T is."""
    rows = {(row.schedule, row.tensor): row for row in compared().measured}
    assert {key: (row.devices, row.ranks, row.m, row.replicas) for key, row in rows.items()} == {
        ("dp", 1): (8, 8, 1, 8),
        ("dp", 2): (4, 8, 2, 4),
        ("dp", 4): (2, 8, 4, 2),
        ("1f1b", 2): (4, 8, 8, 1),
        ("1f1b", 4): (2, 8, 8, 1),
    }
    for row in rows.values():
        assert row.token_rate is not None
        assert row.token_rate == pytest.approx(16 * S / float(row.step), rel=1e-12)
        assert row.per_device == pytest.approx(row.token_rate / 8, rel=1e-12)
        assert row.to_builtins()["ranks"] == 8


def test_groups_of_context_are_devices_too() -> None:
    """T x C ranks are one, of the same samples; all of 8 ranks, which share the tokens of these."""
    rows = compared(tensor=[1, 2], context=["1", "2"], micro_batch="2").measured
    found = {(row.schedule, row.tensor, int(row.asked["context"])): row for row in rows}
    assert {key: row.devices for key, row in found.items()} == {(name, t, c): 8 // (t * c) for name, t, c in found}
    assert {("dp", t, c) for t in (1, 2) for c in (1, 2)} <= found.keys()
    for row in rows:
        assert (row.ranks, row.batch) == (8, 16)
        assert row.per_device * 8 == pytest.approx(16 * S / float(row.step), rel=1e-12)


def test_tables_show_ranks() -> None:
    text = str(compared())
    assert text.startswith("8 ranks, 16 samples")
    assert "ranks" in text and "/rank" in text and "devices" not in text.splitlines()[2]
    assert "devices" in str(compared(tensor=1)).splitlines()[2]


def test_a_group_divides_the_devices() -> None:
    with pytest.raises(RequestError, match="tensor: 4 do not divide 6 devices into groups; give a divisor of them"):
        compared(devices=6, tensor=4, batch=12)
    with pytest.raises(RequestError, match="context: 4 do not divide 6 devices into groups; give a divisor of them"):
        compared(devices=6, tensor=2, context=2, batch=12)
    with pytest.raises(RequestError, match="tensor: 4 do not divide 6 devices into groups; give a divisor of them"):
        plan(SMALL, cluster=NODES, devices=6, batch=12, tensor=4, schedules=["1f1b"])


def test_micro_batches_of_other_samples_make_the_batch() -> None:
    (row,) = compared(tensor=2, micro_batch=4, devices=4).measured[:1]
    assert (row.schedule, row.m, row.replicas, row.batch) == ("dp", 2, 2, 16)


def test_plans_count_ranks() -> None:
    """Their best candidate with --tensor 4 is that of half as many devices of two ranks as `compare` shows it."""
    found = plan(SMALL, cluster=NODES, devices=8, batch=16, tensor=[2, 4], schedules=["1f1b", "dp"])
    assert found.proved and found.best is not None
    assert {row.measured.ranks for row in found.rows} == {8}
    assert str(found).startswith("8 ranks, 16 samples in a training step")
    shown = [float(row.step) for row in compared(tensor=[2, 4], recompute="none").measured if row.fits]
    assert float(found.best.measured.step) <= min(shown) * (1 + 1e-9)
    assert {one.options["tensor"] for one in found.search.space.candidates} == {2, 4}
    assert {one.devices for one in found.search.space.candidates if not one.refusal} == {8}


def test_plans_of_fewer_ranks() -> None:
    """Of the divisors of 8, those that two ranks divide; the fewest devices are those of one group."""
    found = plan(SMALL, cluster=NODES, devices=8, batch=16, tensor=2, schedules=["dp"], fewer=True, objective="devices")
    assert {one.devices for one in found.search.space.candidates if not one.refusal} == {2, 4, 8}
    assert found.best is not None and found.best.measured.ranks == 2


def test_summaries_say_what_a_rank_reaches() -> None:
    """Of the steady state, as `compare` has it; in words beside the six facts."""
    run = simulate("1f1b", 2, m=4, model=MODEL, cluster=cluster(), tensor=T)
    row, summary = evaluate(run.request), run.summary()
    assert {name: summary[name] for name in ("mfu", "hfu", "tokens_per_rank", "flops_per_rank")} == pytest.approx(
        {"mfu": row.mfu, "hfu": row.hfu, "tokens_per_rank": row.per_device, "flops_per_rank": row.flops}, rel=1e-12
    )
    words, table = overview(run), run.exchanges
    assert table is not None and row.hfu is not None
    assert words["utilization"].startswith(f"MFU {100 * (row.mfu or 0):.1f} %, HFU {100 * row.hfu:.1f} %; ")
    share = 100 * sum(each.times * each.exposed for each in table) / (2 * float(row.step))
    assert words["exchanges"].startswith(f"{sum(each.times for each in table)} a step in groups of {T} ranks; ")
    assert f" {share:.1f} % " in words["exchanges"]
    assert "2 devices of 4 ranks" in words["run"]
    assert not {"utilization", "exchanges"} & overview(simulate("1f1b", 2)).keys()
