"""Layers split by hand end where one process does, with the collectives and bytes that papers and the rule say."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from cdpsim.errors import RequestError
from cdpsim.model.splitting import NO_MESH, Mesh
from validation.peers.split_layers import (
    MESHES,
    SAMPLES,
    SHAPE,
    SplitTrained,
    apart,
    compare_splits,
    split_differences,
    train_split,
)
from validation.peers.split_layers import drawn_parameters as drawn
from validation.ranks.launcher import Ranks
from validation.replay.contents import ReplayError

STREAM = 8 * SHAPE.length * SAMPLES * SHAPE.width  # bytes between two layers: 8 s b h
Runs = dict[Mesh, list[SplitTrained]]
GATHER, SCATTER, REDUCE = ("all-gather", STREAM), ("reduce-scatter", STREAM), ("all-reduce", STREAM)


@pytest.fixture(scope="module")
def alone() -> SplitTrained:
    return train_split(None, SHAPE, NO_MESH)


@pytest.fixture(scope="module")
def trained() -> Iterator[Runs]:
    with Ranks(2) as ranks:
        yield {mesh: ranks.call(train_split, SHAPE, mesh) for mesh in MESHES.values()}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_ranks_do_as_one_process_and_the_rule(mesh: Mesh, trained: Runs, alone: SplitTrained) -> None:
    assert split_differences(trained[mesh], alone, SHAPE, mesh) == []


def test_one_process_keeps_what_the_rule_says_and_calls_nothing(alone: SplitTrained) -> None:
    assert split_differences([alone], alone, SHAPE, NO_MESH) == []
    assert not any(alone.calls.values())


def test_training_moves_every_parameter(alone: SplitTrained) -> None:
    """Else parameters would be equal for nothing."""
    random = torch.Generator().manual_seed(48)
    for i in range(SHAPE.layers):
        for name, before in drawn(SHAPE, random).items():
            assert np.abs(alone.parameters[f"{i} {name}"] - before.numpy()).max() > 1e-4


def test_collectives_are_those_of_the_papers(trained: Runs) -> None:
    """Two all-reduces each way (Shoeybi 2020, figure 4), or two gathers and two scatters (Korthikanti 2022, 4.2.2)."""
    tensor, sequence, kept = (trained[mesh][1].calls for mesh in MESHES.values())
    assert tensor == {"forward": {REDUCE: 4}, "backward": {REDUCE: 4}, "step": Counter()}
    # Two layers of two norms (2 h each) and two biases of row-split products (h each).
    once = {("all-reduce", 2 * 6 * 8 * SHAPE.width): 1}
    assert kept == {"forward": {GATHER: 4, SCATTER: 4}, "backward": {GATHER: 4, SCATTER: 4}, "step": once}
    assert sequence == kept | {"backward": {GATHER: 8, SCATTER: 4}}  # each gathered input once more


def test_kept_bytes_are_those_of_a_layers_tensors(trained: Runs) -> None:
    """Two layers of x, y1, x2, y2, q, k, v, o, softmax, u and w; a norm keeps two numbers of each token beside."""
    h, a, s, f, t = SHAPE.width, SHAPE.heads, SHAPE.length, SHAPE.sizes["f"], 2
    rows = 8 * s * SAMPLES
    split = rows * (4 * h + a * s + 2 * f) // t
    in_sums = {"tensor": 4, "sequence": 4 / t, "sequence, gathered kept": 2 + 2 / t}
    for name, mesh in MESHES.items():
        for rank in trained[mesh]:
            assert sum(rank.kept) == 2 * (split + in_sums[name] * rows * h)
            assert rank.statistics == 2 * 2 * 2 * rows // (t if mesh.sequence else 1)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_what_another_split_does_is_named(mesh: Mesh, trained: Runs, alone: SplitTrained) -> None:
    for other in MESHES.values():
        said = split_differences(trained[mesh], alone, SHAPE, other)
        assert any("calls" in line for line in said) == (other != mesh)
        assert any("keeps" in line for line in said) == (other != mesh)


@pytest.mark.parametrize("name", ["0 norm 1", "1 qkv", "1 down bias"])
@pytest.mark.parametrize("wrong", [1e-9, np.nan])
def test_a_wrong_parameter_of_one_rank_is_named(name: str, wrong: float, trained: Runs, alone: SplitTrained) -> None:
    """A copy that has drifted from the other rank's, or a share; and a number that is none."""
    mesh = MESHES["sequence"]
    first, second = trained[mesh]
    other = second.parameters[name].copy()
    other.flat[0] += wrong
    changed = [first, second._replace(parameters=second.parameters | {name: other})]
    assert not apart(changed, alone) <= 1e-12
    assert [line for line in split_differences(changed, alone, SHAPE, mesh) if line.startswith("parameters are ")]


def test_the_page_has_these_bytes(trained: Runs) -> None:
    page = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")
    for mesh in MESHES.values():
        first = trained[mesh][0]
        assert f"| {sum(first.kept):,} B | {first.statistics:,} B |\n" in page
    assert f"of {STREAM:,} B" in page


def test_the_command_prints_all_splits(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_splits([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name}  " in said for name in MESHES)
    assert said.endswith("\nall as the rule says\n")


def test_the_command_takes_nothing() -> None:
    with pytest.raises(RequestError, match=r"^--ranks: is not known; the check of split layers takes no options$"):
        compare_splits(["--ranks"])


def test_a_rank_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ReplayError("rank 1: is gone (killed by SIGKILL)", "killed")

    monkeypatch.setattr(Ranks, "call", fail)
    with pytest.raises(RequestError, match=r"^ranks: rank 1: is gone \(killed by SIGKILL\)$"):
        compare_splits([])
