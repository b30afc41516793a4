"""The presets of the package load, name their sources, and have the numbers of these sources."""

import csv
import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from cdpsim import presets, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Cluster
from cdpsim.model import Model, Stage
from tests.conftest import Command

CLUSTERS = ["a100-nodes", "b200-node", "grand-teton", "h100-node", "h100-nodes", "h200-node", "pcie-box", "selene"]
CLUSTERS += ["v100-node"]


def test_names() -> None:
    assert presets.preset_names("clusters") == CLUSTERS
    assert set(presets.preset_names("models")) >= {"gpt2", "llama2-7b", "llama3-8b", "resnet50", "vit-b16"}


def test_what_ships_is_read_and_grouped_once() -> None:
    """The list of names that a caller gets is a copy."""
    assert presets.model("gpt2").grouped(4) is presets.find_model("gpt2").grouped(4)
    assert presets.cluster("h100-node") is presets.find_cluster("h100-node")
    presets.preset_names("clusters").clear()
    assert presets.preset_names("clusters") == CLUSTERS


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_says_its_sources(name: str) -> None:
    about = presets.preset_comment("clusters", name)
    assert re.search(r"NVIDIA (HGX )?\w+ data sheet \(.*20\d\d\)", about)
    for subject in ("Speeds", "Memory", "Links", "Latency", "Achieved", "Reached of links"):
        assert f"\n{subject}: " in about
    assert max(map(len, presets.preset_text("clusters", name).splitlines())) <= 120


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_named_as_its_file_and_survives_it(name: str, tmp_path: Path) -> None:
    cluster = presets.cluster(name)
    assert cluster.name == name
    cluster.save(tmp_path / "again.toml")
    assert Cluster.load(tmp_path / "again.toml") == cluster
    (tmp_path / "copy.toml").write_text(presets.preset_text("clusters", name))
    assert Cluster.load(tmp_path / "copy.toml") == cluster


# From NVIDIA's white papers on Volta (2017), Ampere (2020) and Hopper (2022): multiprocessors, fused multiply-adds that
# each does in a cycle (CUDA cores in fp32; tensor cores in fp16, dense), and the boost clocks of both in GHz. No white
# paper has them for the B200: sellers print 148 and 1.98; tensor cores are twice as wide as a Hopper's, and their clock
# is what its sheet's peak leaves.
CHIPS = {
    "v100-node": (80, 64, 8 * 64, 1.53, 1.53),
    "a100-nodes": (108, 64, 4 * 256, 1.41, 1.41),
    "selene": (108, 64, 4 * 256, 1.41, 1.41),
    "b200-node": (148, 128, 8 * 512, 1.98, 1.855),
    "grand-teton": (132, 128, 4 * 512, 1.98, 1.83),
    "h100-node": (132, 128, 4 * 512, 1.98, 1.83),
    "h200-node": (132, 128, 4 * 512, 1.98, 1.83),
    "h100-nodes": (132, 128, 4 * 512, 1.98, 1.83),
    "pcie-box": (114, 128, 4 * 512, 1.755, 1.62),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_peaks_are_those_of_the_chip_without_sparsity(name: str) -> None:
    """Data sheets agree with what multiprocessors do in a cycle; tf32 at half the rate of fp16, fp8 at twice."""
    chips, scalar, tensor, clock, tensor_clock = CHIPS[name]
    speeds = presets.cluster(name).devices[0].speeds
    assert speeds is not None
    half = 2 * chips * tensor * tensor_clock * 1e9
    assert speeds.fp16 == pytest.approx(half, rel=0.005)
    assert speeds.fp32 == pytest.approx(2 * chips * scalar * clock * 1e9, rel=0.005)
    if name != "v100-node":  # which has tensor cores for fp16 alone
        assert speeds.bf16 == speeds.fp16
        assert speeds.tf32 == pytest.approx(half / 2, rel=0.005)
    assert speeds.fp8 == (None if name in ("v100-node", "a100-nodes", "selene") else pytest.approx(2 * half, rel=0.005))
    # Vector fp64 at half of fp32's rate; tensor cores of the A100 and H100 at all of it.
    halved = 2 if name in ("v100-node", "b200-node") else 1
    assert speeds.fp64 == pytest.approx((speeds.fp32 or 0) / halved, rel=0.02)


@pytest.mark.parametrize(
    ("name", "memory", "inside", "between"),
    [
        # Twelve NVLinks, of whose 25 GB/s each way NCCL takes 20 to be reached; of 100 Gb/s, 12 GB/s.
        ("a100-nodes", 80e9, 12 * 20e9, 12e9),
        ("h100-nodes", 80e9, 18 * 20.6e9, 4 * 12e9),
        ("grand-teton", 80e9, 18 * 20.6e9, 4 * 12e9),
        ("h100-node", 80e9, 18 * 20.6e9, None),
        ("h200-node", 141e9, 18 * 20.6e9, None),
    ],
)
def test_bandwidths_are_one_ways(name: str, memory: float, inside: float, between: float | None) -> None:
    cluster = presets.cluster(name)
    assert cluster.memory_bytes(1).tolist() == [memory]
    cluster = cluster.sized(16 if between else 8)
    latency, bandwidth = cluster.link_costs(np.zeros(7, int), np.arange(1, 8))
    assert bandwidth == pytest.approx(inside)
    assert latency == pytest.approx(3.4e-6)
    if between:
        latency, bandwidth = cluster.link_costs(np.zeros(8, int), np.arange(8, 16))
        assert bandwidth == pytest.approx(between)
        assert latency == pytest.approx(14e-6)
        assert cluster.nodes(np.arange(16)).tolist() == [0] * 8 + [1] * 8


def test_a_b200_reaches_what_was_measured() -> None:
    """SimuMax 1.2, configs/system/b200_bf16_ceperm.json: of 900 GB/s, gathers reach 67.3 %, all to all 59.7 %."""
    cluster = presets.cluster("b200-node")
    (latency,), (bandwidth,) = cluster.link_costs(np.zeros(1, int), np.ones(1, int))
    assert latency == pytest.approx(9e-6) and bandwidth == pytest.approx(0.673 * 900e9)
    kernels = cluster.devices[0].kernels
    assert kernels is not None and kernels.all_to_all * bandwidth == pytest.approx(0.597 * 900e9, rel=1e-3)


def test_a_v100_has_six_links() -> None:
    """20 of 25 GB/s each way on each; the pairs of a hybrid cube mesh, no two farther apart than two of them."""
    cluster = presets.cluster("v100-node")
    graph = cluster.graph
    assert np.bincount(graph.tail, graph.bandwidth).tolist() == [6 * 20e9] * 8
    assert np.bincount(graph.tail).tolist() == [4] * 8
    assert {len(cluster.route(a, b)) for a in range(8) for b in range(8) if a != b} == {1, 2}
    # The two quads are alike, joined by one double link for each device: a cube with diagonals in two faces.
    across = {(a, b) for a, b in zip(graph.tail.tolist(), graph.head.tolist(), strict=True) if a < 4 <= b}
    assert across == {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_a_pcie_box_is_as_wide_everywhere_and_farther_through_the_cpus() -> None:
    latency, bandwidth = presets.cluster("pcie-box").link_costs(np.zeros(7, int), np.arange(1, 8))
    assert bandwidth.tolist() == [48e9] * 7  # of 64, as NCCL takes 12 of 16
    assert latency.tolist() == pytest.approx([5.7e-6] * 3 + [11.4e-6] * 4)


def test_a_run_has_the_nodes_that_it_needs(tmp_path: Path) -> None:
    """Sixteen devices are two nodes; messages between nodes go over the network, in a reopened run as well."""
    stage = Stage(forward=1.0, backward=2.0, parameters=125 * 10**6)
    trace = simulate("multi-cdp", model=Model(stages=(stage,) * 16), cluster="a100-nodes")
    took = trace.messages["end"] - trace.messages["start"]
    src, dst = trace.messages["src"], np.array([int(members) for members in trace.messages["dst"]])
    inside = src // 8 == dst // 8
    assert inside.any()
    assert not inside.all()
    assert took[inside] == pytest.approx(3.4e-6 + 0.125 / 240, rel=1e-6)
    assert took[~inside] == pytest.approx(14e-6 + 0.125 / 12, rel=1e-6)
    trace.save(tmp_path / "trace")
    again = reopen(tmp_path / "trace")
    assert again.summary() == trace.summary()


def test_lists_in_every_form(command: Command) -> None:
    for kind in ("models", "clusters"):
        names = presets.preset_names(kind)
        rows = json.loads(command(kind, "--format", "json").out)
        assert [row["name"] for row in rows] == names
        assert all(row["about"] == presets.preset_comment(kind, row["name"]) for row in rows)
        table = list(csv.DictReader(StringIO(command(kind, "--format", "csv").out)))
        assert [row["name"] for row in table] == names
        code, out, err = command(kind)
        assert (code, err) == (0, "")
        assert all(re.search(rf"^{re.escape(name)} ", out, re.MULTILINE) for name in names)


def test_a_clusters_row_is_what_its_file_says(command: Command) -> None:
    row = next(row for row in json.loads(command("clusters", "--format", "json").out) if row["name"] == "a100-nodes")
    assert (row["devices"], row["memory_bytes"], row["achieved"], row["topology"]) == (None, 80e9, 0.44, "nodes")
    assert row["speeds"]["bf16"] == 312e12
    assert row["speeds"]["fp8"] is None
    assert [link["bandwidth_bytes_per_second"] for link in row["links"]] == [240e9, 12e9]
    table = csv.DictReader(StringIO(command("clusters", "--format", "csv").out))
    shown = next(row for row in table if row["name"] == "a100-nodes")
    assert (shown["devices"], shown["memory"], float(shown["tf32"]), shown["fp8"]) == ("", "80000000000", 156e12, "")
    assert [float(part) for part in shown["bandwidth_bytes_per_second"].split("|")] == [240e9, 12e9]
    assert [float(part) for part in shown["latency_seconds"].split("|")] == [3.4e-6, 14e-6]


def test_a_clusters_row_has_units_for_people(command: Command) -> None:
    header, _, *rows = (re.split(r"  +", line) for line in command("clusters").out.splitlines())
    shown = next(row for row in (dict(zip(header, row, strict=True)) for row in rows) if row["name"] == "a100-nodes")
    assert (shown["devices"], shown["memory"], shown["tf32"], shown["fp8"]) == ("any", "80 GB", "156", "-")
    assert shown["links"] == "240 GB/s 3.4 us, 12 GB/s 14 us"


def test_a_models_row_sums_its_stages(command: Command) -> None:
    row = next(row for row in json.loads(command("models", "--format", "json").out) if row["name"] == "vit-b16")
    assert row["stages"] == 14
    # Dosovitskiy et al. 2021, table 1: 86 million parameters (86,567,656 in torchvision's), 4 bytes each.
    assert row["parameters_bytes"] == 4 * 86_567_656
    assert row["backward_flop"] == pytest.approx(2 * row["forward_flop"], rel=0.02)


@pytest.mark.parametrize(("kind", "name"), [("clusters", "a100-nodes"), ("models", "gpt2")])
def test_one_is_printed_as_its_file(command: Command, kind: str, name: str) -> None:
    assert command(kind, name) == (0, presets.preset_text(kind, name), "")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("clusters a100-node", "cluster: unknown cluster 'a100-node'; did you mean 'a100-nodes'?"),
        ("models ../gpt2", "model: unknown model '../gpt2'; did you mean 'gpt2'?"),
        ("models gpt2 --format json", "format: is of the table, but 'gpt2' is printed as its file; leave one out"),
        ("clusters --format yaml", "format: unknown format 'yaml'; known are text, json, csv"),
        ("simulate multi-dp -n 2 --cluster a100-node -o x", "cluster: unknown cluster 'a100-node'; did you mean"),
        (
            "simulate multi-dp -n 9 --model gpt2 --cluster h100-node -o x",
            "cluster 'h100-node': has 8 devices, but multi-dp needs 9",
        ),
    ],
)
def test_what_there_is_not_is_refused(command: Command, line: str, problem: str) -> None:
    code, out, err = command(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"cdpsim: error: {problem}")
    assert err.count("\n") == 1
