"""Mixtures of experts that ranks share, beside one process and beside the rule of `cdpsim`.

    python -m validation.peers.split_experts    # two ranks, by gloo; a few seconds

As `split_layers` does, this trains whole models. Each rank has samples of its own, and half of the experts of a layer.
The gradients of all other weights are summed once a step, which is what a data axis does. Where tokens go to all
experts in turn, or experts have a capacity and what is more is dropped, rows, calls and kept bytes are those of the
rule; where routers choose and nothing is dropped, parameters alone are compared.
"""

import sys
from typing import Any

from cdpsim.cli.console import exit_code_of
from cdpsim.model.layers import Layers
from cdpsim.model.splitting import Mesh

from .expert_operators import Uneven
from .split_layers import LLAMA_LIKE, RANKS, SIZES, print_comparison

OF_EXPERTS: dict[str, Any] = {"experts": 4, "top_k": 2, "expert_ffn": 24}
EXPERT_SHAPES = {
    "mixtral": Layers(**SIZES, **LLAMA_LIKE, **OF_EXPERTS, key_value_heads=2),
    "dense first, shared expert": Layers(**SIZES, **LLAMA_LIKE, **OF_EXPERTS, dense_layers=1, shared_ffn=40),
    "capacity": Layers(**SIZES, **LLAMA_LIKE, **OF_EXPERTS, capacity=1.1),
    "no gates, every second layer": Layers(**SIZES, **OF_EXPERTS, biases="qkv", frequency=2),
}
EXPERT_MESHES = {"in turn": (Mesh(expert=RANKS), Mesh()), "chosen": (Uneven(expert=RANKS), Uneven())}


def compare_experts(arguments: list[str]) -> int:
    """Compare both ways in which tokens get their experts."""
    checks = [(EXPERT_SHAPES, {name: mesh}, whole) for name, (mesh, whole) in EXPERT_MESHES.items()]
    return print_comparison(arguments, "experts", checks)


if __name__ == "__main__":
    sys.exit(exit_code_of(compare_experts))
