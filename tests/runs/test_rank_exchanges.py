"""The table of exchanges within groups of ranks, against counts by hand, payloads of rings, and times without links."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cdpsim
from cdpsim import RequestError, Run, simulate
from cdpsim.trace.table import ExchangeRow
from tests.helpers.split_layers import LAYERS, MODEL, B, H, S, T, cluster

M, N = 6, 2  # micro-batches, stages
WHOLE = 2 * B * S * H  # bytes of what lies between layers
REDUCE, GATHER, SCATTER = "all-reduce", "all-gather", "reduce-scatter"


def ran(schedule: str = "1f1b", **options: Any) -> Run:
    """A run of the small model in two stages."""
    asked: dict[str, Any] = {"m": M, "steps": 2, "model": MODEL, "cluster": cluster(), "tensor": T} | options
    return simulate(schedule, N, **asked)


def counts(run: Run, size: int = WHOLE) -> Counter[tuple[int, str, str]]:
    """How many exchanges of a size each stage and kind of task has in a step."""
    found: Counter[tuple[int, str, str]] = Counter()
    for row in run.exchanges or ():
        if row.size == size:
            found[row.stage, row.kind, row.op] += int(row.times)
    return found


def test_layers_sum_twice_each_way() -> None:
    """Shoeybi et al. 2020, section 3: two all-reduces of 2 b s h bytes in the forward of a layer, two in its backward.

    The embedding sums once in the forward, the head once in the backward. The second stage gathers what it is sent.
    """
    each = M * LAYERS // N * 2
    expected = {
        (0, "F", REDUCE): each + M,
        (0, "B", REDUCE): each,
        (0, "B", GATHER): M,
        (1, "F", GATHER): M,
        (1, "F", REDUCE): each,
        (1, "B", REDUCE): each + M,
    }
    assert counts(ran()) == expected
    assert counts(ran(whole_boundaries=True)) == {key: many for key, many in expected.items() if key[2] != GATHER}


def test_the_loss_sums_three_numbers_of_each_token() -> None:
    """Of 4 bytes; Megatron-LM's cross-entropy over a split vocabulary."""
    assert counts(ran(), 4 * B * S) == {(1, "F", REDUCE): 3 * M}


def test_sequences_are_gathered_and_scattered() -> None:
    """Korthikanti et al. 2022, section 4.2.2: two of each both ways, and the inputs of products gathered once more."""
    each = M * LAYERS // N * 2
    assert counts(ran(sequence=True)) == {
        (0, "F", GATHER): each,
        (0, "F", SCATTER): each + M,
        (0, "B", GATHER): 2 * each + M,
        (0, "B", SCATTER): each,
        (1, "F", GATHER): each + M,
        (1, "F", SCATTER): each,
        (1, "B", GATHER): 2 * each + M,
        (1, "B", SCATTER): each + M,
    }


def test_norms_are_summed_once_a_step() -> None:
    """A layer's two norms and the biases of its two last products, 6 h; the head's norm, 2 h; positions, s h."""
    rows = [row for row in ran(sequence=True).exchanges or () if row.kind == "U"]
    bytes_of = {row.stage: row.size for row in rows}
    layers = LAYERS // N * 6 * H
    assert bytes_of == {0: 2 * (layers + S * H), 1: 2 * (layers + 2 * H)}
    assert {(row.op, row.times) for row in rows} == {(REDUCE, 1)}
    assert not [row for row in ran().exchanges or () if row.kind == "U"]


def test_parts_of_backwards_have_their_own() -> None:
    """Inputs are gathered again for the weights' part, and their gradients scattered in the input's.

    The first stage sends no gradient, so that its backward is all of one part.
    """
    found, whole = counts(ran("zb-h1", sequence=True)), counts(ran(sequence=True))
    each = M * LAYERS // N * 2
    assert {key: many for key, many in found.items() if key[0] == 1} == {
        (1, "F", GATHER): each + M,
        (1, "F", SCATTER): each,
        (1, "B", GATHER): each,
        (1, "B", SCATTER): each + M,
        (1, "W", GATHER): each + M,
    }
    for op in (GATHER, SCATTER):
        assert found[0, "W", op] == whole[0, "B", op]
    tables = [[row for row in ran(name, sequence=True).exchanges or () if row.stage == 0] for name in ("1f1b", "zb-h1")]
    hidden = [sum(row.times * (row.seconds - row.exposed) for row in table) for table in tables]
    assert hidden[0] == pytest.approx(hidden[1], rel=1e-9)
    assert hidden[0] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pp-cdp"])
@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"recompute": "layer"}, {"replicas": 3, "zero": 1}])
def test_what_is_exposed_is_what_links_add(schedule: str, options: dict[str, Any]) -> None:
    """Tasks take so much longer than on links that take no time."""
    asked = {**options, "ignore_memory": True}
    run, free = ran(schedule, **asked), ran(schedule, **asked, cluster=cluster("inf", 0.0))
    busy = [float((one.tasks["end"] - one.tasks["start"]).sum()) for one in (run, free)]
    table = run.exchanges
    assert table is not None
    added = sum(row.times * row.exposed for row in table) * 2  # steps
    assert added == pytest.approx(busy[0] - busy[1], rel=1e-9)
    assert (table.exposed <= table.seconds * (1 + 1e-12)).all()


def test_payloads_and_times_alone() -> None:
    """A ring of t ranks sends (t-1)/t of the tensor, for an all-reduce twice, in as many rounds; ranks meet first."""
    table = ran(sequence=True, collective="ring", cluster=cluster(meet=3e-6)).exchanges
    assert table is not None
    for row in table:
        rounds = (T - 1) * (1 + (row.op == REDUCE))
        assert row.sent == rounds * row.size // T
        assert row.seconds == pytest.approx(3e-6 + rounds * (2e-6 + row.size / T / 1e9), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"replicas": 2}])
def test_bytes_sent_include_them(options: dict[str, Any]) -> None:
    """Beside boundaries of shares, and gradients: those of a rank, as `compare` has them of all ranks."""
    run = ran(**options)
    table = run.exchanges
    assert table is not None
    exchanged, summary = sum(row.times * row.sent for row in table), run.summary()
    messages = run.messages
    single = float(messages["size"][messages["op"] == "p2p"].sum()) / 2
    sent = sum(row["bytes"] for row in summary["bytes_sent"]) / 2
    assert sent >= exchanged + single
    assert ("replicas" in options) or sent == exchanged + single
    assert cdpsim.evaluate(run.request).sent == pytest.approx(sent * T, rel=1e-12)


def test_few_micro_batches_show_the_bytes_of_many() -> None:
    """A comparison runs few of many micro-batches."""
    request: dict[str, Any] = {"n": N, "steps": 3, "model": MODEL, "cluster": cluster(), "tensor": T}
    few, more, many = (cdpsim.evaluate("1f1b", m=m, **request).sent for m in (50, 100, 400))
    assert many - more == pytest.approx(6 * (more - few), rel=1e-9)


def test_files_have_the_table(tmp_path: Path) -> None:
    """Never a row for a task: more micro-batches change no number of rows. A trace without groups removes the file."""
    run = ran(sequence=True)
    assert run.exchanges is not None
    assert len(run.exchanges) == len(ran(sequence=True, m=10 * M).exchanges or ())
    run.save(tmp_path)
    lines = (tmp_path / "exchanges.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split(",") == [*ExchangeRow._fields]
    assert len(lines) == 1 + len(run.exchanges)
    assert cdpsim.load(tmp_path).exchanges == run.exchanges
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert (summary["devices"], summary["ranks_per_device"]) == (N, T)
    ran(tensor=1).save(tmp_path, force=True)
    assert not (tmp_path / "exchanges.csv").exists()
    assert cdpsim.load(tmp_path).exchanges is None


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    run = ran()
    run.save(tmp_path)
    path = tmp_path / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(summary | {"exchanges": [{"stage": 0}]}), encoding="utf-8")
    with pytest.raises(RequestError, match=r"exchanges: of this trace's summary are no table"):
        _ = cdpsim.load(tmp_path).exchanges


def test_runs_without_groups_say_nothing_of_them() -> None:
    """Of a model of layers on single ranks only its utilization."""
    summary = ran(tensor=1).summary()
    assert not {"exchanges", "ranks_per_device"} & summary.keys()
    assert (
        not {"mfu", "hfu", "exchanges"} & simulate("1f1b", 2, model="resnet50", cluster="a100-nodes").summary().keys()
    )
