"""Transformers whose ranks have some positions of each sequence, beside one process and beside the rule of `cdpsim`.

    python -m validation.peers.split_context    # two ranks, by gloo; a few seconds

As `split_layers` does, this trains whole models, with an attention whose keys and values are gathered, passed on in a
ring, or that is split by heads. All else of a layer is done on a rank's own positions, and the gradients of weights are
summed once a step, which is what a data axis does.
"""

import sys

from cdpsim.cli.console import exit_code_of
from cdpsim.model.layers import Layers
from cdpsim.model.splitting import NO_MESH, Mesh

from .split_layers import LLAMA_LIKE, RANKS, SIZES, print_comparison

OF_CONTEXT = SIZES | {"length": 12}  # each rank has two chunks of three
CONTEXT_SHAPES = {
    "gpt": Layers(**OF_CONTEXT),
    "llama": Layers(**OF_CONTEXT, **LLAMA_LIKE, key_value_heads=2),
    "parallel, one norm": Layers(**OF_CONTEXT, parallel=True, positions=16),
}
CONTEXT_MESHES = {
    "gather": Mesh(context=RANKS),
    "gather, gathered kept": Mesh(context=RANKS, keeps_gathered=True),
    "ring": Mesh(context=RANKS, attention_exchange="ring"),
    "all-to-all": Mesh(context=RANKS, attention_exchange="all-to-all"),
}


def compare_contexts(arguments: list[str]) -> int:
    """Compare each way in which ranks exchange keys and values."""
    return print_comparison(arguments, "contexts", [(CONTEXT_SHAPES, CONTEXT_MESHES, NO_MESH)])


if __name__ == "__main__":
    sys.exit(exit_code_of(compare_contexts))
