"""Commands that list the models and clusters that ship with the package, or print the file of one to copy."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cdpsim import model, presets
from cdpsim.cli.commands.options import FORMAT, format_of
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose
from cdpsim.files.tables import format_table
from cdpsim.files.units import quantity_text

Record = dict[str, Any]  # what JSON says of a model or cluster

_SPEEDS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_FIELD_UNITS = {"bytes": "B", "flop": "FLOP"}  # by the last word of a field's name
_PRESET_NAME = partial(
    argument, "name", nargs="?", metavar="NAME", help="print its file, to copy and change (default: list all)"
)


@command("models", _PRESET_NAME(choices=presets.models()), FORMAT)
def models_command(args: argparse.Namespace) -> int:
    """List the models that ship, or print the file of one."""
    return _print(args, "models", _model_record)


@command("clusters", _PRESET_NAME(choices=presets.clusters()), FORMAT)
def clusters_command(args: argparse.Namespace) -> int:
    """List the clusters that ship, or print the file of one."""
    return _print(args, "clusters", _cluster_record)


def _print(args: argparse.Namespace, kind: str, record_of: Callable[[str], Record]) -> int:
    """Print all models or clusters as a table, or the file of one."""
    form, names = format_of(args), presets.preset_names(kind)
    if args.name is not None:
        if form != "text":
            raise RequestError("format", f"is of the table, but {args.name!r} is printed as its file; leave one out")
        write_stdout(presets.preset_text(kind, choose(kind.removesuffix("s"), args.name, presets.preset_names(kind))))
        return 0
    records = [record_of(name) | {"about": presets.preset_comment(kind, name)} for name in names]
    cells_of = _number_cells if form == "csv" else _text_cells
    rows = []
    for record in records:
        row: Record = {}
        for field, value in (record | {"about": record["about"].partition("\n")[0]}).items():
            row |= cells_of(field, value)
        rows.append(row)
    write_stdout(format_table(form, records, [*rows[0]], [[*row.values()] for row in rows]))
    return 0


def _model_record(name: str) -> Record:
    """Return what a micro-batch does in a model and leaves there, summed over stages; a tied tensor counts once."""
    found = presets.model(name)
    return {
        "name": name,
        "stages": found.n,
        "precision": found.precision,
        "forward_flop": sum(float(stage.forward) for stage in found.stages),
        "backward_flop": sum(float(stage.backward) for stage in found.stages),
        "parameter_count": found.parameter_bytes // model.PRECISIONS[found.precision],
        "parameters_bytes": found.parameter_bytes,
        "activations_bytes": int(found.size("activation").sum()),
    }


def _cluster_record(name: str) -> Record:
    """Return what one device of a cluster does and holds, and the links between two."""
    cluster = presets.cluster(name)
    devices = cluster.devices[0]
    known = devices.speeds.known if devices.speeds is not None else {}
    return {
        "name": name,
        "devices": cluster.count,
        "memory_bytes": devices.memory,
        "speeds": {precision: known.get(precision) for precision in _SPEEDS},
        "achieved": devices.achieved,
        "topology": cluster.topology.kind if cluster.topology is not None else "edges",
        "links": distinct_links(cluster),
    }


def distinct_links(cluster: Cluster) -> list[dict[str, float]]:
    """Return the different latencies and reached bandwidths between two devices; of two nodes where it may grow."""
    per_node = cluster.topology.per_node if cluster.topology is not None else None
    count = cluster.count or 2 * (per_node or 1)
    src, dst = np.nonzero(~np.eye(count, dtype=np.bool_))
    links = np.unique(np.stack(cluster.sized(count).link_costs(src, dst)), axis=1).T.tolist()
    return [{"latency_seconds": latency, "bandwidth_bytes_per_second": bandwidth} for latency, bandwidth in links]


def _text_cells(field: str, value: Any) -> Record:
    """Return the cells for people of a field, by their headings: with units, four digits, and speeds in TFLOPS."""
    if field == "speeds":
        return {precision: peak and f"{peak / 1e12:g}" for precision, peak in value.items()}
    if field == "links":
        links = (
            f"{_rounded(link['bandwidth_bytes_per_second'], 'B/s')} {_rounded(link['latency_seconds'], 's')}"
            for link in value
        )
        return {"links": ", ".join(links)}
    if field == "parameter_count":
        return {"parameters": f"{value / 1e6:,.1f} M"}
    if field == "parameters_bytes":
        return {"weights": _rounded(value, "B")}
    name, _, ending = field.rpartition("_")
    if ending in _FIELD_UNITS:
        return {name: _rounded(value, _FIELD_UNITS[ending])}
    return {field: "any" if field == "devices" and value is None else value}


def _number_cells(field: str, value: Any) -> Record:
    """Return the cells for programs of a field, by their headings; of links the latencies and the bandwidths."""
    if field == "speeds":
        return dict(value)
    if field == "links":
        return {name: "|".join(repr(link[name]) for link in value) for name in value[0]}
    name, _, ending = field.rpartition("_")
    return {name if ending in _FIELD_UNITS else field: value}


def _rounded(value: float | None, unit: str) -> str | None:
    return None if value is None else quantity_text(float(f"{value:.4g}"), unit)
