"""Contexts and experts split by hand end where one process does, with the calls and bytes that papers say."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

import torch

from cdpsim.errors import RequestError
from cdpsim.model.splitting import NO_MESH, Mesh
from validation.peers.context_operators import own_positions
from validation.peers.split_context import CONTEXT_MESHES, CONTEXT_SHAPES, compare_contexts
from validation.peers.split_experts import EXPERT_MESHES, EXPERT_SHAPES, compare_experts
from validation.peers.split_layers import (
    RANKS,
    SAMPLES,
    SplitTrained,
    apart,
    bytes_by_ring,
    split_differences,
    train_split,
)
from validation.ranks.launcher import Ranks

MESHES = CONTEXT_MESHES | {name: mesh for name, (mesh, _) in EXPERT_MESHES.items()}
WHOLE = dict.fromkeys(CONTEXT_MESHES, NO_MESH) | {name: whole for name, (_, whole) in EXPERT_MESHES.items()}
SHAPES = dict.fromkeys(CONTEXT_MESHES, CONTEXT_SHAPES) | dict.fromkeys(EXPERT_MESHES, EXPERT_SHAPES)
CASES = [(shape, mesh) for mesh in MESHES for shape in SHAPES[mesh]]
GPT = CONTEXT_SHAPES["gpt"]
ALL = 4 * SAMPLES * GPT.length * GPT.width  # bytes of all keys, or values, of a layer
Trained = Callable[[str, str], list[SplitTrained]]  # of a shape and a split


@pytest.fixture(scope="module")
def alone() -> Trained:
    return cache(lambda name, mesh: [train_split(None, SHAPES[mesh][name], WHOLE[mesh], MESHES[mesh].expert)])


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    with Ranks(RANKS) as ranks:
        yield cache(lambda name, mesh: ranks.call(train_split, SHAPES[mesh][name], MESHES[mesh], MESHES[mesh].expert))


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_ranks_of_an_axis_do_as_one_process_and_the_rule(
    name: str, mesh: str, trained: Trained, alone: Trained
) -> None:
    assert split_differences(trained(name, mesh), alone(name, mesh)[0], SHAPES[mesh][name], MESHES[mesh]) == []


def test_keys_and_values_travel_as_papers_say(trained: Trained) -> None:
    """A ring sends keys and values once and in the backward twice, with their gradients (Liu 2023, section 3).

    All-gathers and reduce-scatters send as much (Llama 3, 3.3.2). Heads take 2 / c and 1 / c of that (Jacobs 2023,
    section 3.2).
    """
    share = ALL // RANKS
    gather, kept, ring, heads = (trained("gpt", mesh)[1].calls for mesh in CONTEXT_MESHES)
    layers = GPT.layers
    assert gather["forward"] == {("all-gather", ALL): 2 * layers}
    assert gather["backward"] == {("all-gather", ALL): 2 * layers, ("reduce-scatter", ALL): 2 * layers}
    assert kept["backward"] == {("reduce-scatter", ALL): 2 * layers}
    for phase, messages in (("forward", 1), ("backward", 2)):  # of two values
        assert ring[phase] == {("send", 2 * share): messages * layers, ("receive", 2 * share): messages * layers}
        assert heads[phase] == {("all-to-all", ALL): 4 * layers}
        sent = {name: bytes_by_ring(each[phase], RANKS) for name, each in (("gather", gather), ("ring", ring))}
        assert sent["gather"] == sent["ring"] == bytes_by_ring(heads[phase], RANKS) * messages * RANKS // 2


def test_a_context_keeps_a_share_of_what_one_process_keeps(trained: Trained, alone: Trained) -> None:
    """All but one number of the loss; beside it the gathered keys, or an output by heads that a core keeps."""
    whole = sum(alone("gpt", "ring")[0].kept) - 4
    more = {"gather": 0, "gather, gathered kept": 2 * ALL, "ring": 0, "all-to-all": ALL // RANKS}
    for mesh, size in more.items():
        assert {sum(rank.kept) - 4 for rank in trained("gpt", mesh)} == {whole // RANKS + GPT.layers * size}


def test_rows_of_tokens_travel_there_and_back(trained: Trained) -> None:
    """A rank sends (E - 1) / E of its rows, top_k of each token, twice each way (Lepikhin 2020, 3.2)."""
    shape = EXPERT_SHAPES["mixtral"]
    rows = 4 * SAMPLES * shape.length * shape.top_k * shape.width
    for rank in trained("mixtral", "in turn"):
        for phase in ("forward", "backward"):
            assert rank.calls[phase] == {("all-to-all", RANKS * rows): 2 * shape.layers}
            sent = 2 * shape.layers * rows * (RANKS - 1) // RANKS
            assert bytes_by_ring(rank.calls[phase], RANKS) == sent


def test_chosen_experts_get_other_numbers_of_rows(trained: Trained) -> None:
    """Else the uneven case would be the even one again."""
    first, second = (rank.calls["forward"] for rank in trained("mixtral", "chosen"))
    assert first != second


def test_a_capacity_makes_chosen_rows_even(trained: Trained) -> None:
    """Each rank sends ceil(1.1 x tokens x top_k / experts) rows to every expert, whatever is chosen (Switch, 2.2)."""
    shape = EXPERT_SHAPES["capacity"]
    rows = 4 * 17  # of 60: ceil(16.5) for each
    whole = ("all-to-all", RANKS * rows * 4 * shape.width)
    for rank in trained("capacity", "chosen"):
        assert rank.calls["forward"] == rank.calls["backward"] == {whole: 2 * shape.layers}


@pytest.mark.parametrize("context", [2, 3])
def test_each_rank_has_as_much_of_a_causal_core(context: int) -> None:
    """A position sees itself and all before it."""
    own = [own_positions(torch.arange(12), 0, Mesh(context=context), rank) for rank in range(context)]
    assert {int((each + 1).sum()) for each in own} == {12 * 13 // 2 // context}
    assert sorted(torch.cat(own).tolist()) == [*range(12)]


@pytest.mark.parametrize(("mesh", "name", "parameter"), [("ring", "gpt", "0/qkv"), ("chosen", "mixtral", "1/router")])
def test_a_parameter_that_is_off_is_named(
    mesh: str, name: str, parameter: str, trained: Trained, alone: Trained
) -> None:
    first, second = trained(name, mesh)
    other = second.parameters[parameter].copy()
    other.flat[0] += 1e-9
    changed = [first, second._replace(parameters=second.parameters | {parameter: other})]
    whole, shape = alone(name, mesh)[0], SHAPES[mesh][name]
    assert not apart(changed, whole, shape, MESHES[mesh]) <= 1e-12
    assert split_differences(changed, whole, shape, MESHES[mesh])[0].startswith("parameters are ")


@pytest.mark.parametrize("mesh", CONTEXT_MESHES)
def test_what_another_exchange_does_is_named(mesh: str, trained: Trained, alone: Trained) -> None:
    for name, other in CONTEXT_MESHES.items():
        said = split_differences(trained("gpt", mesh), alone("gpt", mesh)[0], GPT, other)
        for word in ("calls", "exchanges"):
            assert any(f" {word} " in line for line in said) == (name != mesh)


def test_rows_for_one_expert_of_each_token_are_named(trained: Trained, alone: Trained) -> None:
    other = replace(EXPERT_SHAPES["mixtral"], top_k=1)
    said = split_differences(trained("mixtral", "in turn"), alone("mixtral", "in turn")[0], other, MESHES["in turn"])
    for word in ("calls", "keeps", "exchanges"):
        assert any(f" {word} " in line for line in said)


@pytest.mark.parametrize(("command", "meshes"), [(compare_contexts, CONTEXT_MESHES), (compare_experts, EXPERT_MESHES)])
def test_the_commands_print_all_cases(
    command: Callable[[list[str]], int],
    meshes: dict[str, object],
    capsys: pytest.CaptureFixture[str],
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [(name, mesh) for name, mesh in CASES if mesh in meshes]
    ready = {(SHAPES[mesh][name], MESHES[mesh]): trained(name, mesh) for name, mesh in cases}
    monkeypatch.setattr(Ranks, "call", lambda ranks, function, shape, mesh, teams: ready[shape, mesh])
    assert command([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name}; {mesh}  " in said for name, mesh in cases)
    assert said.endswith("\nall as the rule says\n")


@pytest.mark.parametrize(("command", "what"), [(compare_contexts, "contexts"), (compare_experts, "experts")])
def test_the_commands_take_nothing(command: Callable[[list[str]], int], what: str) -> None:
    with pytest.raises(RequestError, match=rf"^--ranks: is not known; the check of split {what} takes no options$"):
        command(["--ranks"])
