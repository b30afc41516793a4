"""What ships with the package: models and clusters, as tables and as files to copy."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cdpsim.cli import help
from cdpsim.cli.commands.options import add_format
from cdpsim.cli.console import add_command, write
from cdpsim.errors import RequestError, choose

if TYPE_CHECKING:
    from cdpsim.cluster import Cluster
    from cdpsim.model import Model

Row = dict[str, Any]

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


def add_models(commands: Any) -> None:
    """Add the command that lists models."""
    about = "the models that ship with the package, or the file of one"
    _add(commands, "models", _serve_models, about, help.MODELS)


def add_clusters(commands: Any) -> None:
    """Add the command that lists clusters."""
    about = "the clusters that ship with the package, or the file of one"
    _add(commands, "clusters", _serve_clusters, about, help.CLUSTERS)


def _add(commands: Any, name: str, serve: Callable[[argparse.Namespace], int], about: str, more: str) -> None:
    parser = add_command(commands, name, serve, about, more)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print its file, to copy and change (default: all)")
    add_format(parser)


def _serve_models(options: argparse.Namespace) -> int:
    from cdpsim import presets

    return _serve(options, "models", lambda name: _model_row(name, presets.model(name)))


def _serve_clusters(options: argparse.Namespace) -> int:
    from cdpsim import presets

    return _serve(options, "clusters", lambda name: _cluster_row(name, presets.cluster(name)))


def _serve(options: argparse.Namespace, kind: str, row: Callable[[str], Row]) -> int:
    """Print all of a kind as a table, or one as its file."""
    from cdpsim import presets
    from cdpsim.files import tables

    form = tables.check_format(options.format, tables.DATA_FORMATS)
    if options.name is not None:
        if form != "text":
            raise RequestError("format", f"is of the table, but {options.name!r} is printed as its file; leave one out")
        write(presets.preset_text(kind, choose(kind.removesuffix("s"), options.name, presets.preset_names(kind))))
        return 0
    rows = [row(name) | {"about": presets.preset_comment(kind, name)} for name in presets.preset_names(kind)]
    if form == "json":
        write(tables.as_json(rows))
        return 0
    shown = [(_data if form == "csv" else _shown)(own) for own in rows]
    write(tables.FORMATS[form](list(shown[0]), [list(cells.values()) for cells in shown]))
    return 0


def _model_row(name: str, model: "Model") -> Row:
    """What a micro-batch does in a model and leaves there, summed over stages; a tied tensor counts once."""
    from cdpsim.model import PRECISIONS as BYTES

    return {
        "name": name,
        "stages": model.n,
        "precision": model.precision,
        "forward_flop": sum(float(stage.forward) for stage in model.stages),
        "backward_flop": sum(float(stage.backward) for stage in model.stages),
        "parameter_count": model.parameter_bytes // BYTES[model.precision],
        "parameters_bytes": model.parameter_bytes,
        "activations_bytes": int(model.size("activation").sum()),
    }


def _cluster_row(name: str, cluster: "Cluster") -> Row:
    """What one device of a cluster does and holds, and what lies between two."""
    devices = cluster.devices[0]
    known = devices.speeds.known if devices.speeds is not None else {}
    return {
        "name": name,
        "devices": cluster.count,
        "memory_bytes": devices.memory,
        "speeds": {precision: known.get(precision) for precision in PRECISIONS},
        "achieved": devices.achieved,
        "topology": cluster.topology.kind if cluster.topology is not None else "edges",
        "links": links(cluster),
    }


def links(cluster: "Cluster") -> list[dict[str, float]]:
    """Give the different latencies and reached bandwidths between two devices; of two nodes where it may grow."""
    import numpy as np

    nodes = cluster.topology.per_node if cluster.topology is not None and cluster.topology.per_node else 1
    count = cluster.count or 2 * nodes
    cluster = cluster.sized(count)
    src, dst = np.nonzero(~np.eye(count, dtype=np.bool_))
    found = np.unique(np.stack(cluster.link_costs(src, dst)), axis=1).T.tolist()
    return [{"latency_seconds": latency, "bandwidth_bytes_per_second": bandwidth} for latency, bandwidth in found]


def _shown(row: Row) -> dict[str, str]:
    """A row's cells for people: prefixes to units, three digits, the first line of what it is about."""
    cells: dict[str, str] = {}
    for key, value in row.items():
        if key == "speeds":
            cells |= {precision: "-" if peak is None else f"{peak / 1e12:g}" for precision, peak in value.items()}
        elif key == "links":
            cells["links"] = ", ".join(_link(link) for link in value)
        elif key == "parameter_count":
            cells["parameters"] = f"{value / 1e6:,.1f} M"
        elif key == "parameters_bytes":
            cells["weights"] = _amount(value, "B")
        elif key.endswith("_bytes"):
            cells[key.removesuffix("_bytes")] = _amount(value, "B")
        elif key.endswith("_flop"):
            cells[key.removesuffix("_flop")] = _amount(value, "FLOP")
        elif key == "about":
            cells["about"] = value.partition("\n")[0]
        else:
            cells[key] = "any" if key == "devices" and value is None else str(value)
    return cells


def _data(row: Row) -> Row:
    """A row's cells for programs, in the columns of `_shown`; of links the latencies and the bandwidths."""
    values = row | {"about": row["about"].partition("\n")[0]}
    cells: Row = {}
    for key, value in values.items():
        if key == "speeds":
            cells |= value
        elif key == "links":
            cells |= {name: "|".join(repr(link[name]) for link in value) for name in value[0]}
        else:
            cells[key.removesuffix("_bytes").removesuffix("_flop")] = value
    return cells


def _link(link: dict[str, float]) -> str:
    latency, bandwidth = link["latency_seconds"], link["bandwidth_bytes_per_second"]
    return f"{_amount(bandwidth, 'B/s')} {_amount(latency, 's')}"


def _amount(value: float | None, unit: str) -> str:
    from cdpsim.files import units

    return "-" if value is None else units.text(float(f"{value:.4g}"), unit)
