"""What a run is of, in words: its model and how that is trained, its cluster, and what its memory leaves out."""

from collections.abc import Mapping
from typing import Any

from cdpsim.cluster import Cluster
from cdpsim.model import Model
from cdpsim.request import Request

BUT = "without CUDA context and allocator reserve"
UNCOUNTED = f"memory is {BUT}"


def setting(request: Mapping[str, Any]) -> list[str]:
    """Say model, optimizer, samples, precision and cluster, as far as a request has them; of the slot model nothing.

    The request of a loaded trace may be anything: what cannot be asked says as much as its tables do.
    """
    if not isinstance(request, Request):
        try:
            request = Request.from_builtins(request)
        except (ValueError, TypeError, KeyError, AttributeError):
            return _recorded(request)
    return setting_of(request.model, request.cluster)


def _recorded(request: Mapping[str, Any]) -> list[str]:
    model, cluster = request.get("model"), request.get("cluster")
    words = []
    if isinstance(model, dict):
        stages = model.get("stages")
        kept = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
        has_state = any(stage.keys() & {"optimizer", "host_optimizer"} for stage in kept)
        words = _of_model(*(model.get(name) for name in ("name", "samples", "precision")), has_state=has_state)
    return words + (_of_cluster(cluster.get("name")) if isinstance(cluster, dict) else [])


def setting_of(model: Model, cluster: Cluster) -> list[str]:
    """Say the same of a model and a cluster."""
    has_state = any(stage.optimizer or stage.host_optimizer for stage in model.stages)
    words = [] if model.is_unit else _of_model(model.name, model.samples, model.precision, has_state=has_state)
    return words + ([] if cluster.is_unit else _of_cluster(cluster.name))


def _of_model(name: object, samples: object, precision: object, *, has_state: bool) -> list[str]:
    """Say what a model file says on top; its name ends in the recipe by which it is trained."""
    words = [str(name or "a model"), *["no optimizer state"] * (not has_state)]
    words += [f"{samples} samples a micro-batch"] if samples else []
    return words + ([str(precision)] if precision else [])


def _of_cluster(name: object) -> list[str]:
    return [str(name or "a cluster")]


def untied(stages: tuple[int, ...], schedules: list[str]) -> str:
    """Say which schedules leave tied stages untied, and why."""
    named, listed = " and ".join(map(str, stages)), ", ".join(schedules)
    return f"tied stages {named} are untied in {listed}: steps are not flushed there, and each has a tensor of its own"
