"""The model and the cluster of a request in words, for titles and notes of pictures and tables."""

from collections.abc import Mapping
from typing import Any

from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import DISORDER_OPTIONS, Disorder, disorder_of
from cdpsim.errors import RequestError
from cdpsim.files.units import in_number
from cdpsim.model import UNIT_MODELS, Model
from cdpsim.model.runtime import PAPER, Runtime
from cdpsim.request import Request

MEMORY_LEAVES_OUT = "without CUDA context and allocator reserve"
MEMORY_NOTE = f"memory is {MEMORY_LEAVES_OUT}"


def describe_request(request: Mapping[str, Any]) -> list[str]:
    """Return model, optimizer, samples, precision, cluster and runtime, as far as a request has them.

    The request of a loaded trace may be anything: where it makes no request, its tables are described as they are.
    """
    if not isinstance(request, Request):
        try:
            request = Request.from_builtins(request)
        except (ValueError, TypeError, KeyError, AttributeError):
            return _describe_record(request)
    return describe_setup(request.model, request.cluster, request.runtime)


def describe_setup(model: Model, cluster: Cluster, runtime: Runtime) -> list[str]:
    """Return the same description of a model, a cluster and a runtime; nothing in the slot model, on paper."""
    has_state = any(stage.optimizer or stage.host_optimizer for stage in model.stages)
    words = [] if model.is_unit else _describe_model(model.name, model.samples, model.precision, has_state=has_state)
    words += [] if cluster.is_unit else [cluster.name or "a cluster"]
    return words if runtime == PAPER else [*words, f"runtime {runtime}"]


def _describe_record(request: Mapping[str, Any]) -> list[str]:
    model, cluster = request.get("model"), request.get("cluster")
    words = []
    if isinstance(model, dict):
        stages = model.get("stages")
        tables = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
        has_state = any(stage.keys() & {"optimizer", "host_optimizer"} for stage in tables)
        words = _describe_model(*map(model.get, ("name", "samples", "precision")), has_state=has_state)
    return [*words, str(cluster.get("name") or "a cluster")] if isinstance(cluster, dict) else words


def _describe_model(name: object, samples: object, precision: object, *, has_state: bool) -> list[str]:
    """Return the description of a model, whose name ends in its training recipe."""
    words = [str(name or "a model"), *["no optimizer state"] * (not has_state)]
    words += [f"{samples} {in_number(samples, 'sample')} a micro-batch"] if samples else []
    return words + ([str(precision)] if precision else [])


def describe_disorder(request: Mapping[str, Any]) -> list[str]:
    """Return what disturbs a run, by its recorded request; that of a loaded trace is unchecked."""
    recorded = {name: request[name] for name in DISORDER_OPTIONS if name in request}
    try:
        return disorder_of(Disorder(), **recorded, slots=request.get("model") in UNIT_MODELS).words()
    except RequestError:
        return ["disturbed"]


def describe_untied(stages: tuple[int, ...], schedules: list[str]) -> str:
    """Return which schedules leave tied stages untied, and why."""
    tied, untying = " and ".join(map(str, stages)), ", ".join(schedules)
    return f"tied stages {tied} are untied in {untying}: steps are not flushed there, and each has a tensor of its own"
