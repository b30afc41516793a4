"""What a run is of, in words: its model and how that is trained, its cluster, and what its memory leaves out."""

from collections.abc import Mapping
from typing import Any

BUT = "without CUDA context and allocator reserve"
UNCOUNTED = f"memory is {BUT}"


def setting(request: Mapping[str, Any]) -> list[str]:
    """Say model, optimizer, samples, precision and cluster, as far as a request has them; of the slot model nothing.

    The request of a loaded trace may be anything.
    """
    model, cluster = request.get("model"), request.get("cluster")
    words = _of_model(model) if isinstance(model, dict) else []
    return words + ([str(cluster.get("name") or "a cluster")] if isinstance(cluster, dict) else [])


def _of_model(model: Mapping[str, Any]) -> list[str]:
    """Say what a model file says on top; its name ends in the recipe by which it is trained."""
    stages = model.get("stages")
    kept = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    words = [str(model.get("name") or "a model")]
    words += [] if any(stage.keys() & {"optimizer", "host_optimizer"} for stage in kept) else ["no optimizer state"]
    words += [f"{model['samples']} samples a micro-batch"] if model.get("samples") else []
    return words + ([str(model["precision"])] if model.get("precision") else [])


def untied(stages: tuple[int, ...], schedules: list[str]) -> str:
    """Say which schedules leave tied stages untied, and why."""
    named, listed = " and ".join(map(str, stages)), ", ".join(schedules)
    return f"tied stages {named} are untied in {listed}: steps are not flushed there, and each has a tensor of its own"
