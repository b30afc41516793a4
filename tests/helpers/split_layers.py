"""A small model of layers, and nodes on which groups of ranks split it."""

from typing import Any

T, B, S, H, V = 4, 2, 64, 256, 1024  # ranks, samples of a micro-batch, tokens, width, vocabulary
LAYERS = 4
MODEL: dict[str, Any] = {
    "name": "small",
    "precision": "fp16",
    "samples": B,
    "layers": {"layers": LAYERS, "width": H, "heads": 8, "length": S, "vocabulary": V, "tied": False},
}


def cluster(bandwidth: float | str = 1e9, latency: float = 1e-6, meet: float = 0.0) -> dict[str, Any]:
    """Nodes of 8 devices."""
    link = {"latency": latency, "bandwidth": bandwidth}
    kernels = {"products": 1.0, "passes": 1.0, "core": 1.0, "meet": meet}
    return {
        "devices": {"speeds": {"fp16": 1e12}, "memory_bandwidth": 1e12, "kernels": kernels},
        "topology": {"kind": "nodes", "per_node": 8, "nics": 8, "link": link, "network": link},
    }
