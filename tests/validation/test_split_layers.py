"""Models split by hand end where one process does, with the collectives and bytes that papers and the rule say."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from cdpsim.errors import RequestError
from cdpsim.model.splitting import NO_MESH, Mesh
from validation.peers.split_layers import (
    MESHES,
    RANKS,
    SAMPLES,
    SHAPES,
    SplitTrained,
    apart,
    bytes_beside,
    bytes_by_ring,
    compare_splits,
    simulated_exchanges,
    split_differences,
    train_split,
)
from validation.peers.split_layers import drawn_parameters as drawn
from validation.ranks.launcher import Ranks
from validation.replay.contents import ReplayError

GPT = SHAPES["gpt"]
TOKENS = GPT.length * SAMPLES
STREAM = 4 * TOKENS * GPT.width  # bytes between two layers: 4 s b h
Trained = Callable[[str, str], list[SplitTrained]]  # of a shape and a split
GATHER, SCATTER, REDUCE = ("all-gather", STREAM), ("reduce-scatter", STREAM), ("all-reduce", STREAM)
LOSS = ("all-reduce", 4 * TOKENS)


@pytest.fixture(scope="module")
def alone() -> Callable[[str], SplitTrained]:
    return cache(lambda name: train_split(None, SHAPES[name], NO_MESH))


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    with Ranks(RANKS) as ranks:
        yield cache(lambda name, mesh: ranks.call(train_split, SHAPES[name], MESHES[mesh]))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SHAPES)
def test_ranks_do_as_one_process_and_the_rule(
    name: str, mesh: str, trained: Trained, alone: Callable[[str], SplitTrained]
) -> None:
    assert split_differences(trained(name, mesh), alone(name), SHAPES[name], MESHES[mesh]) == []


@pytest.mark.parametrize("name", SHAPES)
def test_one_process_keeps_what_the_rule_says_and_calls_nothing(
    name: str, alone: Callable[[str], SplitTrained]
) -> None:
    assert split_differences([alone(name)], alone(name), SHAPES[name], NO_MESH) == []
    assert not any(alone(name).calls.values())


@pytest.mark.parametrize("name", SHAPES)
def test_training_moves_every_parameter(name: str, alone: Callable[[str], SplitTrained]) -> None:
    """Else parameters would be equal for nothing."""
    for parameter, before in drawn(SHAPES[name]).items():
        assert np.abs(alone(name).parameters[parameter] - before.numpy()).max() > 1e-4


def test_collectives_are_those_of_the_papers(trained: Trained) -> None:
    """Two all-reduces each way of a layer (Shoeybi 2020, figure 4), or two of both (Korthikanti 2022, 4.2.2).

    The embedding sums in the forward, the head in the backward; the loss sums three numbers of each token.
    """
    tensor, sequence, kept = (trained("gpt", mesh)[1].calls for mesh in MESHES)
    assert tensor == {"forward": {REDUCE: 5, LOSS: 3}, "backward": {REDUCE: 5}, "step": Counter()}
    # Two layers of two norms (2 h each) and two biases of row-split products (h each), the last norm, the positions.
    once = {("all-reduce", 4 * GPT.width * (2 * 6 + 2 + GPT.length)): 1}
    forward = {GATHER: 5, SCATTER: 5, LOSS: 3}
    assert kept == {"forward": forward, "backward": {GATHER: 5, SCATTER: 5}, "step": once}
    assert sequence == kept | {"backward": {GATHER: 10, SCATTER: 5}}  # each gathered input once more


def test_shared_heads_are_summed_once_a_step(trained: Trained) -> None:
    """One head's keys and values, of which both ranks have copies: 2 d (h + 1) numbers of each layer."""
    numbers = 2 * 2 * (GPT.width // GPT.heads) * (GPT.width + 1)
    once = {("all-reduce", 4 * numbers): 1}
    assert trained("one key/value head", "tensor")[0].calls["step"] == once
    norms = 5 * 2 * GPT.width + GPT.length * GPT.width
    assert trained("one key/value head", "sequence")[0].calls["step"] == {("all-reduce", 4 * (numbers + norms)): 1}
    assert not trained("llama", "tensor")[0].calls["step"]


def test_one_norm_is_gathered_for_attention_and_mlp_together(trained: Trained) -> None:
    """An input of two products is gathered once in each pass, and its gradient scattered once."""
    calls = trained("parallel, one norm", "sequence")[0].calls
    assert calls["forward"][GATHER] == 3 and calls["backward"][SCATTER] == 3


def test_kept_bytes_are_those_of_a_models_tensors(trained: Trained) -> None:
    """Of a layer x, y1, x2, y2, q, k, v, o, softmax, u and w; of the head x, y, probabilities; tokens and targets.

    A norm keeps two numbers of each token beside, and two masks say which tokens and targets are of the other rank.
    """
    h, a, s, f, v, t = GPT.width, GPT.heads, GPT.length, GPT.sizes["f"], 256, RANKS
    split = 4 * TOKENS * (2 * (4 * h + a * s + 2 * f) + v) // t
    in_sums = {"tensor": 10, "sequence": 10 / t, "sequence, gathered kept": 5 + 5 / t}
    for mesh, times in in_sums.items():
        for rank in trained("gpt", mesh):
            statistics = 4 * 5 * 2 * TOKENS // (t if MESHES[mesh].sequence else 1)
            assert sum(rank.kept) == split + times * 4 * TOKENS * h + (8 + 8 + 2) * TOKENS + statistics


def test_a_fused_core_keeps_four_bytes_of_each_head_and_token(trained: Trained) -> None:
    """In place of the softmax, 4 s bytes of each; of heads that share keys no copies are made."""
    for name in ("gpt", "llama"):
        for mesh in MESHES:
            eager, fused = (sum(trained(f"{name}{kind}", mesh)[0].kept) for kind in ("", ", fused attention"))
            heads = SHAPES[name].layers * TOKENS * GPT.heads // RANKS
            assert eager - fused == 4 * heads * (GPT.length - 1)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_another_split_does_is_named(mesh: str, trained: Trained, alone: Callable[[str], SplitTrained]) -> None:
    for name, other in MESHES.items():
        said = split_differences(trained("gpt", mesh), alone("gpt"), GPT, other)
        for word in ("calls", "keeps", "exchanges"):
            assert any(f" {word} " in line for line in said) == (name != mesh)


def test_more_numbers_than_the_rule_says_are_named(trained: Trained, alone: Callable[[str], SplitTrained]) -> None:
    first, second = trained("gpt", "tensor")
    more = first._replace(parameters=first.parameters | {"0/more": np.zeros(3)})
    numbers = sum(each.size for each in first.parameters.values())
    said = split_differences([more, second], alone("gpt"), GPT, MESHES["tensor"])
    assert said == [f"rank 0 has {numbers + 3} numbers, not {numbers}"]


@pytest.mark.parametrize("name", ["0/norm 1", "1/qkv", "1/down bias", "embedding", "last norm"])
@pytest.mark.parametrize("wrong", [1e-9, np.nan])
def test_a_wrong_parameter_of_one_rank_is_named(
    name: str, wrong: float, trained: Trained, alone: Callable[[str], SplitTrained]
) -> None:
    """A copy that has drifted from the other rank's, or a share; and a number that is none."""
    mesh = MESHES["sequence"]
    first, second = trained("gpt", "sequence")
    other = second.parameters[name].copy()
    other.flat[0] += wrong
    changed = [first, second._replace(parameters=second.parameters | {name: other})]
    assert not apart(changed, alone("gpt"), GPT, mesh) <= 1e-12
    said = split_differences(changed, alone("gpt"), GPT, mesh)
    assert [line for line in said if line.startswith("parameters are ")]


def test_the_page_has_these_bytes(trained: Trained) -> None:
    page = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")
    for name, shape in SHAPES.items():
        each: list[tuple[int, int, int, int]] = []
        for split_by, mesh in MESHES.items():
            first = trained(name, split_by)[0]
            beside = sum(size * kept.times for kept, size in bytes_beside(shape, mesh))
            once = sum(size for _, size in first.calls["step"])
            sent = bytes_by_ring(sum(first.calls.values(), Counter[tuple[str, int]]()), RANKS)
            each.append((once, sent, sum(first.kept) - beside, beside))
        cells = (" / ".join(f"{size:,}" if size else "–" for size in column) for column in zip(*each, strict=True))
        assert f"\n| {name} | " in page
        assert f" | {' | '.join(cells)} |\n" in page.split(f"\n| {name} | ")[1].partition("\n")[0] + "\n"
    assert f"of {STREAM:,} B" in page and f"of {4 * TOKENS} B" in page


def test_a_simulated_step_sends_what_two_ranks_do() -> None:
    """Two ranks of a ring: an all-reduce sends the tensor, a gather or a scatter half of it."""
    calls, sent = simulated_exchanges(GPT, Mesh(RANKS, sequence=True))
    assert calls == {GATHER: 15, SCATTER: 10, LOSS: 3, ("all-reduce", 4 * 32 * 24): 1}
    assert sent == 25 * STREAM // 2 + 3 * 4 * TOKENS + 4 * 32 * 24


def test_the_command_prints_all_splits(
    capsys: pytest.CaptureFixture[str], trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {
        (shape, mesh): trained(name, split_by) for name, shape in SHAPES.items() for split_by, mesh in MESHES.items()
    }
    monkeypatch.setattr(Ranks, "call", lambda ranks, function, shape, mesh, teams: calls[shape, mesh])
    assert compare_splits([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name}; {mesh}  " in said for name in SHAPES for mesh in MESHES)
    assert said.endswith("\nall as the rule says\n")


def test_the_command_takes_nothing() -> None:
    with pytest.raises(RequestError, match=r"^--ranks: is not known; the check of split layers takes no options$"):
        compare_splits(["--ranks"])


def test_a_rank_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ReplayError("rank 1: is gone (killed by SIGKILL)", "killed")

    monkeypatch.setattr(Ranks, "call", fail)
    monkeypatch.setattr("validation.peers.split_layers.SHAPES", {"gpt": GPT})
    with pytest.raises(RequestError, match=r"^ranks: rank 1: is gone \(killed by SIGKILL\)$"):
        compare_splits([])
