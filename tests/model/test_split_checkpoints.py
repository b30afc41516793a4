"""`--split-checkpoints` (ZeRO-R): ranks that share a layer keep shares of its input, which the backward gathers."""

from math import isclose
from typing import Any

import pytest

from cdpsim import simulate
from cdpsim.model import Model
from cdpsim.model.layers import Layers

LENGTH, WIDTH, SAMPLES, LAYERS, RANKS = 32, 64, 2, 6, 4
INPUT = 2 * SAMPLES * LENGTH * WIDTH  # bytes, of numbers in 16 bits
MODEL = Model.of_layers(
    Layers(layers=LAYERS, width=WIDTH, heads=8, length=LENGTH, vocabulary=512, positions=False), samples=SAMPLES
)
BANDWIDTH = 1e9
CLUSTER: dict[str, Any] = {
    "devices": {"speed": "1 TFLOPS"},
    "topology": {"kind": "switch", "link": {"bandwidth": BANDWIDTH}},
}


def stages(recompute: str, n: int, **options: Any) -> Any:
    """Run one micro-batch through n stages."""
    options |= {"cluster": CLUSTER, "collective": "ring", "tensor": RANKS, "recompute": recompute}
    return simulate("gpipe", n, m=1, steps=1, model=MODEL, **options)


@pytest.mark.parametrize(("recompute", "inputs"), [("layer", 3), ("layers:2", 2), ("full", 1)])
def test_each_rank_keeps_its_share_and_gathers_the_others_once_a_layer(recompute: str, inputs: int) -> None:
    """Of three layers and the head in the second of two stages; each rank of a ring sends (t - 1) / t of the whole."""
    whole, split = (stages(recompute, 2, split_checkpoints=on) for on in (False, True))
    before, after = (run.request.model.stages[1] for run in (whole, split))
    assert before.activation - after.activation == inputs * (INPUT - INPUT // RANKS)
    assert (before.forward, before.parameters, before.boundary) == (after.forward, after.parameters, after.boundary)
    before, after = (run.request.timed_model.stages[1] for run in (whole, split))
    assert isclose(before.forward, after.forward)
    gather = (RANKS - 1) / RANKS * INPUT / BANDWIDTH
    assert isclose(after.backward - before.backward, inputs * gather, rel_tol=1e-9)


def test_a_share_is_beside_the_whole_while_a_layer_computes_again() -> None:
    """Of a stage's one layer, the backward then holds a share more than without."""
    for recompute in ("layer", "full"):
        whole, split = (stages(recompute, 8, split_checkpoints=on).request.model.stages[3] for on in (False, True))
        assert split.activation == whole.activation - INPUT + INPUT // RANKS
        assert split.activation + split.backward_transient == (
            whole.activation + whole.backward_transient + INPUT // RANKS
        )
