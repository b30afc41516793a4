"""Options of models of layers on the command line: other flags for them, names of other programs, and refusals."""

from pathlib import Path

import pytest

from tests.conftest import Command
from tests.helpers.command_line import assert_refused

GROUP = "simulate 1f1b -n 4 -m 4 --model gpt3-175b --cluster selene --ignore-memory"


@pytest.mark.parametrize("name", ["simulate 1f1b", "compare 1f1b"])
def test_the_short_flags_of_issue_trackers_are_accepted(name: str, command: Command) -> None:
    line = f"{name} -n 4 -m 4 --model megatron-7.5b --cluster selene --recompute layer"
    whole = command(*line.split(), "--tensor", 8, "--sequence")
    assert whole.code == 0
    assert command(*line.split(), "--tp", 8, "--sp") == whole
    assert command(*line.split()).out != whole.out


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--tensor-model-parallel-size", "--tensor"),
        ("--tensor-parallel-degree", "--tensor"),
        ("--tensor-parallel-size", "--tensor"),
        ("--sequence-parallel", "--sequence"),
    ],
)
def test_a_flag_of_another_program_is_refused_with_ours(flag: str, ours: str, command: Command) -> None:
    problem = f"cdpsim: error: {flag}: unknown option; did you mean '{ours}'? see cdpsim simulate --help-all\n"
    assert command(*GROUP.split(), flag, 8).err == problem


def test_help_explains_the_options_of_layers_by_themselves(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = command("simulate", "--help-all").out
    _, _, group = text.partition("\na --model of [layers], and the ranks that share its tensors:\n")
    flags = [line.split("  ")[1] for line in group.split("\n\n")[0].splitlines() if line.startswith("  -")]
    assert flags[:2] == ["--tensor T, --tp T", "--sequence, --sp"]
    assert flags[2:4] == ["--context C, --cp C", "--attention-exchange HOW"]
    assert flags[4:6] == ["--expert E, --ep E", "--node-limit M"]
    assert flags[6:8] == ["--whole-boundaries", "--split-checkpoints"]
    assert flags[8:] == ["--micro-batch B", "--length S", "--cuts L,L,..."]


UNEVEN = {
    "--tensor 5": "tensor: 5 does not divide the 96 heads of gpt3-175b; 4 and 8 do",
    "--tensor 7": "tensor: 7 does not divide the 96 heads of gpt3-175b; 4 and 8 do",
    "--tensor 6": "tensor: groups of 6 ranks do not fill nodes of 8 devices evenly; 4 and 8 do",
    "--tensor 12": "tensor: groups of 12 ranks do not fill nodes of 8 devices evenly; 8 and 16 do",
    "--tensor 0": "tensor: tensor=0 must be at least 1",
    "--sequence": "sequence: is of the ranks of --tensor; give at least 2 of them",
    "--tensor 1 --sequence": "sequence: is of the ranks of --tensor; give at least 2 of them",
    "--whole-boundaries": "whole-boundaries: is of the ranks of --tensor; give at least 2 of them",
    "--tensor 8 --split-checkpoints": (
        "split-checkpoints: is of what recomputed layers keep, and recompute is none; give --recompute layer"
    ),
    "--tensor 8 --split-checkpoints --recompute selective": (
        "split-checkpoints: is of what recomputed layers keep, and recompute is selective; give --recompute layer"
    ),
    "--tensor 8 --sequence --split-checkpoints --recompute layer": (
        "split-checkpoints: is of what --sequence splits anyway; leave either out"
    ),
    "--split-checkpoints --recompute layer": (
        "split-checkpoints: is of the ranks of --tensor; give at least 2 of them"
    ),
    "--tensor 8 --sequence --length 2047": (
        "sequence: 8 ranks do not divide the 2047 tokens of a sample; of lengths, 2040 and 2048 do"
    ),
    "--cuts 25,24,24,24": (
        "cuts: are 4 stages of 97 layers in all, for n=4 of 96 layers; give 4 numbers whose sum is 96"
    ),
    "--cuts 48,48": "cuts: are 2 stages, for n=4; give 4 numbers, or leave -n out",
    "--cuts 24,24,24,x": "cuts: cuts=x must be a whole number of at least 1",
}


@pytest.mark.parametrize("options", UNEVEN)
def test_ranks_that_do_not_fit_are_refused_with_the_nearest_that_do(options: str, command: Command) -> None:
    outcome = command(*GROUP.split(), *options.split())
    assert_refused(outcome)
    assert outcome.err == f"cdpsim: error: {UNEVEN[options]}\n"


GROUPED = """
[layers]
layers = 4
width = 64
heads = 8
length = 32
vocabulary = 100
"""


@pytest.mark.parametrize(
    ("fields", "tensor", "problem"),
    [
        ("key_value_heads = 4", 2, None),
        ("key_value_heads = 4", 8, None),  # each is copied twice
        ("heads = 12\nkey_value_heads = 4\nwidth = 48", 6, "6 does not divide the 4 key/value heads of x; 4 and 12 do"),
        ("ffn = 100", 8, "8 does not divide the 100 numbers of the MLP of x; 4 does"),
        ("heads = 12\nwidth = 48", 5, "5 does not divide the 12 heads of x; 4 and 6 do"),
    ],
)
def test_key_value_heads_are_copied_or_refused(
    fields: str, tensor: int, problem: str | None, command: Command, here: Path
) -> None:
    given = dict(line.split(" = ") for line in (GROUPED[10:] + fields).splitlines() if line)
    (here / "x.toml").write_text("name = 'x'\n[layers]\n" + "\n".join(f"{k} = {v}" for k, v in given.items()))
    (here / "open.toml").write_text('[devices]\nspeed = "1 TFLOPS"\n')
    line = f"simulate gpipe -n 2 -m 2 --model x.toml --cluster open.toml --tensor {tensor}"
    outcome = command(*line.split())
    if problem is None:
        assert outcome.code == 0, outcome.err
    else:
        assert (outcome.code, outcome.err) == (2, f"cdpsim: error: tensor: {problem}\n")


RING = 'name = "x"\n[devices]\ncount = 4\nspeed = "1 TFLOPS"\n[topology]\nkind = "ring"\n'
EDGES = 'name = "x"\n[devices]\ncount = 2\nspeed = "1 TFLOPS"\n[[edges]]\nbetween = [0, 1]\n'
UNLIKE = 'name = "x"\n[[devices]]\ncount = 4\nspeed = "1 TFLOPS"\n[[devices]]\ncount = 4\nspeed = "2 TFLOPS"\n'
SMALL = 'name = "x"\n[devices]\ncount = 8\nspeed = "1 TFLOPS"\n'
BF16 = 'name = "x"\n[devices]\ncount = 8\n[devices.speeds]\nbf16 = "1 TFLOPS"\n'
HAVE = "a group of 2 ranks has no place of its own on cluster 'x', which has"
BAD_CLUSTERS = {
    "edges": (EDGES, 2, f"tensor: {HAVE} edges or links of pairs; take a cluster of nodes, or of one switch"),
    "ring": (RING, 2, f"tensor: {HAVE} a ring or tree; take a cluster of nodes, or of one switch"),
    "unlike": (UNLIKE, 2, f"tensor: {HAVE} unlike devices; take a cluster of nodes, or of one switch"),
    "small": (
        SMALL,
        4,
        "cluster 'x': has 8 devices, but 1f1b needs 16; raise `count` in [devices], ask for fewer stages or ranks, or "
        "take another schedule",
    ),
    "smaller": (
        SMALL,
        16,
        "cluster 'x': has 8 devices, but a group of 16 ranks needs 16; raise `count` in [devices], ask for fewer "
        "stages or ranks, or take another schedule",
    ),
    "precision": (
        BF16,
        2,
        "cluster 'x': has no speed for a model in 'fp16', only for bf16; take another cluster or precision",
    ),
}


@pytest.mark.parametrize("name", BAD_CLUSTERS)
def test_a_cluster_without_a_place_for_groups_is_refused(name: str, command: Command, here: Path) -> None:
    content, tensor, problem = BAD_CLUSTERS[name]
    (here / "x.toml").write_text(content)
    line = f"simulate 1f1b -n 4 -m 4 --model gpt3-175b --cluster x.toml --tensor {tensor} --ignore-memory"
    outcome = command(*line.split())
    assert (outcome.code, outcome.err) == (2, f"cdpsim: error: {problem}\n")
