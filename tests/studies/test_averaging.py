"""ACCO's Fig. 3 (Nabli et al. 2024, section 4): averaging Llama-2-7B's gradients against a forward and backward.

The paper states: A100 with 80 GB, 8 in a node, 100 Gb/s between nodes, a batch that fills the memory, NCCL. It does
not state the number of tokens, the precision of gradients, the attention kernel, or the bandwidth that NCCL reaches.
The three cases here all fill the memory. In two averaging takes three times the forward and backward, in the
third three quarters of it.
"""

from pathlib import Path

import msgspec
import pytest

from cdpsim import Cluster, Model, simulate
from cdpsim.files.units import Number
from cdpsim.model import Runtime
from cdpsim.studies.breakeven import find_break_even
from cdpsim.studies.compare import Measured, measure
from tests.helpers.profiles import A100, profiled

LLAMA = profiled("llama2-7b")

PARAMETERS = 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 2 * 32_000 * 4096 + 4096
NETWORK, NVLINK = 0.96 * 12.5e9, 0.8 * 300e9  # what NCCL takes to be reached of both
# Weights and gradients alone fill the memory; Adam's state, with which the model ships, would not fit beside them.
PLAIN = {"optimizer": "sgd", "mixed_precision": False}


def replicas(model: Model | str, k: int, collective: str = "ring") -> Measured:
    """Each of k devices has the whole model and one micro-batch; then all gradients are averaged."""
    by = collective if k > 1 else "recursive-doubling"  # alone there is nothing to average
    return measure(simulate("multi-dp", 1, m=k, model=model, cluster=A100, collective=by, steps=4, **PLAIN))  # type: ignore[arg-type]


def ring(k: int, number: int = 2) -> float:
    """Patarasuk & Yuan 2009, section 3: 2(k-1) rounds, each of a k-th; within a node, or as slow as between nodes."""
    latency, bandwidth = (3.4e-6, NVLINK) if k <= 8 else (14e-6, NETWORK)
    return 2 * (k - 1) * (latency + number * PARAMETERS / k / bandwidth)


def page_row(weights: str, attention: str) -> list[str]:
    """Averaging, forward and backward, and their quotient on 32 devices, as docs/assumptions/break-even.md has them."""
    page = (Path(__file__).parents[2] / "docs" / "assumptions" / "break-even.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    (row,) = (row[3:] for row in rows if row[:2] == [weights, attention])
    return row


def in_words(averaging: Number, alone: Number) -> list[str]:
    """Return such a row."""
    return [f"{float(averaging):.2f} s", f"{float(alone):.2f} s", f"{float(averaging / alone):.2g}"]


def test_forward_and_backward_are_those_of_a_textbook() -> None:
    """Two FLOP a weight and token, and 4 s d in each layer's attention; backward twice that (Kaplan et al. 2020, 2.1).

    The embedding multiplies nothing. Fused attention does its first product, half of its forward, again backwards.
    """
    model, tokens, length = Model.load(LLAMA), 2 * 4096, 4096
    products = 2 * tokens * (PARAMETERS - 32_000 * 4096)
    attention = 4 * length * 4096 * 32 * tokens
    forward, backward = (sum(getattr(stage, kind) for stage in model.stages) for kind in ("forward", "backward"))
    assert forward == pytest.approx(products + attention, rel=1e-3)
    assert backward == pytest.approx(2 * products + 2.5 * attention, rel=1e-3)
    assert replicas(LLAMA, 1).step == pytest.approx((forward + backward) / (0.44 * 312e12))


def test_the_batch_fills_the_memory() -> None:
    """Weights, gradients and two sequences of 4,096 tokens fit into 80 GB; a third would not."""
    one = replicas(LLAMA, 2)
    assert one.fits
    assert (one.parameters, one.gradients) == (2 * PARAMETERS, 2 * PARAMETERS)
    assert one.memory + one.activations / 2 > 80e9 > one.memory
    assert one.memory == pytest.approx(64.28e9, rel=1e-3)  # its first backward has no gradients yet


@pytest.mark.parametrize(
    ("k", "ratio"),
    [(8, 0.035), (16, 0.748), (24, 0.765), (32, 0.774)],  # of averaging to forward and backward
)
def test_outside_of_a_node_averaging_takes_three_quarters_of_the_pass(k: int, ratio: float) -> None:
    """With bf16 gradients, fused attention and 96 of 100 Gb/s: 22 times what it takes inside, and not four passes."""
    one, alone = replicas(LLAMA, k), replicas(LLAMA, 1).step
    assert one.step is not None
    assert alone is not None
    assert one.step - alone == pytest.approx(ring(k))
    assert (one.step - alone) / alone == pytest.approx(ratio, abs=6e-4)
    assert k != 32 or in_words(one.step - alone, alone) == page_row("bf16", "fused")


def test_the_best_algorithm_takes_no_more_than_the_ring() -> None:
    """Rails move a half to three quarters of it through the card; the binomial tree is beyond four passes."""
    alone = replicas(LLAMA, 1).step or 0
    for k in (16, 24, 32):
        nodes, inside = k // 8, 2 * 7 * (3.4e-6 + 2 * PARAMETERS / 8 / NVLINK)
        rails = inside + 2 * (nodes - 1) * (14e-6 + 2 * PARAMETERS / nodes / NETWORK)  # eight of an eighth on one card
        assert replicas(LLAMA, k, "best").step == pytest.approx(alone + rails)
        assert (replicas(LLAMA, k, "best").step or 0) < alone + ring(k)
        assert (replicas(LLAMA, k, "tree").step or 0) > 4 * alone


def test_four_passes_would_need_a_fifth_of_the_bandwidth() -> None:
    """The bandwidth that NCCL reached is not known; 2.3 GB/s would do: S / (k (4 c / 2(k-1) - latency))."""
    alone = replicas(LLAMA, 1).step or 0

    def run(cluster: object) -> object:
        asked = {"model": LLAMA, "cluster": cluster, "collective": "ring", "steps": 4} | PLAIN
        return simulate("multi-dp", 1, m=32, **asked)  # type: ignore[arg-type]

    one = find_break_even(run, Cluster.load(A100), 4)  # type: ignore[arg-type]
    assert one.break_even == pytest.approx(2 * PARAMETERS / 32 / (4 * alone / 62 - 14e-6), rel=1e-5)
    assert one.break_even == pytest.approx(2.32e9, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "precision", "number", "speed", "attention"),
    [
        # Attention that keeps what it computes leaves room for a single sequence of 2,048 tokens: 3.40 passes.
        ({"dtype": "bfloat16", "attention": "eager"}, "bf16", 2, 312e12, 3),
        # So do weights and gradients of four bytes, kept from step to step, with products in tf32 and fused attention:
        # 3.36 passes.
        ({"dtype": "float32"}, "tf32", 4, 156e12, 3.5),
    ],
    ids=["eager", "tf32"],
)
def test_with_other_assumptions_devices_are_idle_most_of_the_time(
    asked: dict[str, str], precision: str, number: int, speed: float, attention: float
) -> None:
    """As the paper has it beyond 24 devices, even if averaging went on during all of the backward."""
    pytest.importorskip("transformers")
    from validation.profile.command import profile

    found = profile("llama2-7b", batch=1, length=2048, optimizer="sgd", **asked).model  # type: ignore[arg-type]
    model = msgspec.structs.replace(found, precision=precision, runtime=Runtime(gradients="zeroed"))
    alone = replicas(model, 1).step or 0
    for k in (16, 24, 32):
        one = replicas(model, k)
        assert one.fits
        assert one.memory + one.activations > 80e9  # a second sequence would not fit
        averaging = (one.step or 0) - alone
        assert averaging == pytest.approx(ring(k, number))
        hidden = 2 / 3 * alone
        assert (averaging - hidden) / (averaging - hidden + alone) > 0.5
    work = 6 * 2048 * (PARAMETERS - 32_000 * 4096) + attention * 4 * 2048 * 4096 * 32 * 2048
    assert averaging / alone == pytest.approx(ring(32, number) / (work / (0.44 * speed)), rel=1e-3)
    words = ("fp32, products in tf32", "fused") if precision == "tf32" else ("bf16", "eager")
    assert in_words(averaging, alone) == page_row(*words)
    # Four passes: with 80 to 82 % of 100 Gb/s.
    assert 0.79 < 0.96 * averaging / alone / 4 < 0.83
