"""Commands that print tables: schedules, models, clusters, Table 1, published runs, the pyramid, rounds, Fig. 4."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from cdpsim import model, presets
from cdpsim.api import rounds
from cdpsim.cli.arguments import (
    FORMAT,
    FORMAT_OF_PAPERS,
    RUN_OPTIONS,
    SCHEDULE,
    STAGES,
    check_output,
    format_of,
    given_options,
    look_arguments,
    look_of,
    option_arguments,
    options_of,
    output_arguments,
    request_arguments,
    run_of,
)
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import Argument, argument, command
from cdpsim.draw.canvas import PICTURE_ENDINGS
from cdpsim.errors import RequestError, choose
from cdpsim.export import pictures
from cdpsim.files.notes import explain
from cdpsim.files.tables import Column, PrintedTable
from cdpsim.files.units import short_text
from cdpsim.files.writing import check_writable, write_file
from cdpsim.numeric.columns import group_starts
from cdpsim.request import Request
from cdpsim.request.sharing import option_words, options_beyond_usual
from cdpsim.schedules import SCHEDULES, USUAL
from cdpsim.studies.mesh import mesh
from cdpsim.studies.published import compare_published, print_published, summarize_published
from cdpsim.studies.pyramid import pyramid
from cdpsim.studies.superpose import AXES, CURVE_CONTENTS, PAPER_CLAIMS, bytes_text, superpose
from cdpsim.studies.table1 import ACCO_PAPER, CDP_PAPER, METHOD_COLUMNS, TABLED_PAPERS, acco_table1, table1
from cdpsim.trace import table_text
from cdpsim.trace.table import RoundRow, Table

_SCHEDULE_COLUMNS = (
    Column("schedule", attrgetter("name")),
    *(Column(part, attrgetter(f"{part}.name")) for part in ("order", "placement", "rule")),
    Column("state", attrgetter("state.label")),
    Column(
        "options",
        lambda schedule: " ".join(options_beyond_usual(schedule)),
        words=lambda schedule: " ".join(option_words(schedule)),
    ),
    Column("about"),
)
_NAMES_NOTES = (
    "names of dp with --zero: ddp 0, zero-1 1, zero-2 2, zero-3 and fsdp 3",
    "data-axis: --shard --zero --buckets and the other options of the data axis; zero-1: those of --zero 1",
)


@command("schedules", FORMAT)
def schedules_command(args: argparse.Namespace) -> int:
    """List every schedule by name, one line each."""
    table = PrintedTable(_SCHEDULE_COLUMNS, [*SCHEDULES.values()], notes=_NAMES_NOTES)
    options = [{"options": options_beyond_usual(schedule)} for schedule in SCHEDULES.values()]
    record = [each | own for each, own in zip(table.records(), options, strict=True)]
    write_stdout(replace(table, record=record).printed(format_of(args)))
    return 0


@command(
    "table1",
    argument(
        "--paper",
        default=CDP_PAPER,
        choices=TABLED_PAPERS,
        help="cdp (default); acco: memory of DDP, ZeRO-1, SlowMo, CO2 and ACCO",
    ),
    argument("-n", metavar="N", help="stages, and micro-batches; with --paper acco: workers (default 64, as printed)"),
    argument(
        "--parameters", metavar="P", help="with --paper acco: parameters of the model (default 7.5 billion, as printed)"
    ),
    option_arguments(RUN_OPTIONS, steps="3"),
    argument(
        "--shared-parameters",
        action="store_true",
        help="single-*: all micro-batches use one copy of the parameters (default: a copy each, from a stage's "
        "forward to its backward)",
    ),
    argument(
        "--exact", action="store_true", help="run nothing: print the values of the paper and the exact ones, for any N"
    ),
    FORMAT_OF_PAPERS,
)
def table1_command(args: argparse.Namespace) -> int:
    """Print the paper's Table 1: paper | exact | simulated."""
    form, options = format_of(args), given_options(args)
    if choose("paper", args.paper, TABLED_PAPERS) == ACCO_PAPER:
        return _print_acco_table(args, form, options)
    for option, problem, is_wrong in (
        ("-n", "is missing; see cdpsim table1 --help", args.n is None),
        ("parameters", "are those of --paper acco; leave them out", args.parameters is not None),
    ):
        if is_wrong:
            raise RequestError(option, problem)
    table = table1(**options, shared_parameters=args.shared_parameters, exact=args.exact)
    write_stdout(table.printed(form))
    disagreeing = [row["schedule"] for row in table.rows if table.is_simulated and not row["agree"]]
    if disagreeing:
        explain(f"exact and simulated disagree: {', '.join(disagreeing)}")
    return 1 if disagreeing else 0


def _print_acco_table(args: argparse.Namespace, form: str, options: Mapping[str, Any]) -> int:
    """Print Table 1 of the ACCO paper: printed | formula | simulated."""
    given = [name for name in options if name != "n"]
    given += [name for name in ("shared_parameters", "exact") if getattr(args, name)]
    if given:
        name = given[0].replace("_", "-")
        raise RequestError(name, "is of the CDP paper's table; leave it out, or --paper acco")
    size = {"workers": args.n, "parameters": args.parameters}
    rows = acco_table1(**{name: value for name, value in size.items() if value is not None})
    write_stdout(PrintedTable(METHOD_COLUMNS, rows).printed(form))
    disagreeing = [row.method.name for row in rows if not row.agrees]
    if disagreeing:
        explain(f"printed, by formula and simulated disagree: {', '.join(disagreeing)}")
    return 1 if disagreeing else 0


@command(
    "published",
    argument(
        "--only",
        nargs="+",
        default=(),
        metavar="TABLE",
        choices=presets.preset_names("published"),
        help="only these tables (default: all)",
    ),
    *output_arguments("write the tables into a file, in the form of --format", required=False),
    FORMAT,
)
def published_command(args: argparse.Namespace) -> int:
    """Compare what others measured and published with ours."""
    form = format_of(args)
    compared = partial(compare_published, args.only)
    check_output(args.output, partial(check_writable, args.output, force=args.force), [compared])
    rows = compared()
    text = print_published(rows, form)
    if args.output is None:
        write_stdout(text)
    else:
        write_file(args.output, [text], force=args.force)
    broken = [line for line, holds in summarize_published(rows) if not holds]
    for line in broken:
        explain(f"not within the tolerance: {line}")
    return int(bool(broken))


@command(
    "pyramid",
    SCHEDULE(nargs="?", default="mp-cdp", help="the schedule (default mp-cdp, the paper's)"),
    STAGES,
    option_arguments(RUN_OPTIONS),
    request_arguments(),
    FORMAT,
)
def pyramid_command(args: argparse.Namespace) -> int:
    """Count the devices that each stage needs, with a proof."""
    form = format_of(args)
    result = pyramid(run_of(options_of(args, args.schedule)))
    names = ("devices", "bound", "overlap", "path_cover")
    counts = {name: [stage[name] for stage in result["stages"]] for name in names}
    sums = {name: None if None in column else sum(column) for name, column in counts.items()}
    columns = [Column(name.replace("_", " "), itemgetter(name)) for name in ("stage", *names)]
    write_stdout(PrintedTable(columns, [*result["stages"], {"stage": "all"} | sums], result).printed(form))
    return 0


@command(
    "mesh",
    SCHEDULE(nargs="?", help="the schedule (default: 1f1b of several stages, else dp)"),
    STAGES,
    *output_arguments(f"a picture of who has which weights and tokens: {PICTURE_ENDINGS}", required=False),
    look_arguments,
    option_arguments(RUN_OPTIONS),
    request_arguments(),
    FORMAT,
)
def mesh_command(args: argparse.Namespace) -> int:
    """Say which ranks are together, and over which links."""
    form, look = format_of(args), look_of(args)
    options = options_of(args, args.schedule or USUAL[args.n not in (None, "1")])
    if options.get("expert") and options.get("tensor"):
        options.setdefault("sequence", True)  # without which experts are not split
    find = partial(mesh, Request.from_builtins(options))
    check_output(args.output, partial(pictures.check_picture, args.output, look=look, force=args.force), [find])
    found = find()
    if args.output is not None:
        pictures.write_picture("mesh", found, path=args.output, look=look, force=args.force)
    write_stdout(found.table.printed(form))
    return 0


@command(
    "rounds",
    SCHEDULE(help="dpu, wp or acco, whose workers compute while they communicate"),
    STAGES,
    *output_arguments("write each round and worker into a CSV file", required=False),
    option_arguments(RUN_OPTIONS),
    request_arguments(),
    FORMAT,
)
def rounds_command(args: argparse.Namespace) -> int:
    """Count the micro-batches that workers compute while they communicate."""
    form, options = format_of(args), options_of(args, args.schedule)
    if args.output is not None and Path(args.output).suffix.lower() != ".csv":
        raise RequestError(args.output, "rounds are rows of CSV, and no picture; end its name in .csv")
    find = partial(rounds, Request.from_builtins(options))
    check_output(args.output, partial(check_writable, args.output, force=args.force), [find])
    found = find()
    if args.output is not None:
        write_file(args.output, table_text(found), force=args.force)
    unit = "s" if found.posted.dtype.kind == "f" else ""
    counts = ("rounds", "micro batches", "least", "most")
    columns = [Column(name, itemgetter(name.replace(" ", "_"))) for name in counts]
    columns += [Column(name, unit=unit) for name in ("length", "communication")]
    rows = _rounds_in_short(found)
    write_stdout(PrintedTable(columns, rows, rows).printed(form))
    return 0


def _rounds_in_short(found: Table[RoundRow]) -> list[dict[str, Any]]:
    """Return a row for each run of rounds with equal counts: micro-batches in all, least and most, and mean times.

    A round is as long as from the beginning of its communication to that of the next one.
    """
    workers = int(found.device.max()) + 1
    counts = found.micro_batches.reshape(-1, workers)
    begun, ended = (times.reshape(-1, workers).max(axis=1).astype(float) for times in (found.begun, found.ended))
    number = np.cumsum(np.append(0, (np.diff(counts, axis=0) != 0).any(axis=1)))
    number[-1] = number[-2] + 1  # the last one has no communication
    first = group_starts(number)
    rows = []
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(counts)], strict=True):
        name = f"{low}" if high == low + 1 else f"{low}-{high - 1}"
        own = int(counts[low].sum()), int(counts[low].min()), int(counts[low].max())
        until = min(high, len(counts) - 2)
        length = float(begun[until] - begun[low]) / (until - low) if until > low else None
        lasts = float((ended - begun)[low:high].mean()) if high < len(counts) else None
        names = ("rounds", "micro_batches", "least", "most", "length", "communication")
        rows.append(dict(zip(names, (name, *own, length, lasts), strict=True)))
    return rows


_PRESET_NAME = partial(
    argument, "name", nargs="?", metavar="NAME", help="print its file, to copy and change (default: list all)"
)
_MODEL_COLUMNS = (
    *map(Column, ("name", "stages", "precision")),
    Column("forward", itemgetter("forward_flop"), unit="FLOP"),
    Column("backward", itemgetter("backward_flop"), unit="FLOP"),
    Column("parameter_count", heading="parameters", words=lambda record: f"{record['parameter_count'] / 1e6:,.1f} M"),
    Column("parameters", itemgetter("parameters_bytes"), "weights", "B"),
    Column("activations", itemgetter("activations_bytes"), unit="B"),
    Column("about"),
)


def _tflops(precision: str, record: Mapping[str, Any]) -> str | None:
    peak = record[precision]
    return peak and f"{peak / 1e12:g}"


def _of_links(name: str, record: Mapping[str, Any]) -> str:
    return "|".join(repr(link[name]) for link in record["links"])


_SPEEDS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_LINK_UNITS = {"bandwidth_bytes_per_second": "B/s", "latency_seconds": "s"}
_CLUSTER_COLUMNS = (
    Column("name"),
    Column("devices", words=lambda record: str(record["devices"] or "any")),
    Column("memory", itemgetter("memory_bytes"), unit="B"),
    *(Column(precision, words=partial(_tflops, precision)) for precision in _SPEEDS),
    *map(Column, ("achieved", "topology")),
    *(Column(name, partial(_of_links, name), heading="") for name in sorted(_LINK_UNITS, reverse=True)),
    Column(
        "",
        heading="links",
        words=lambda record: ", ".join(
            " ".join(short_text(link[name], unit) for name, unit in _LINK_UNITS.items()) for link in record["links"]
        ),
    ),
    Column("about"),
)


@command("models", _PRESET_NAME(choices=presets.models()), FORMAT)
def models_command(args: argparse.Namespace) -> int:
    """List the models that ship, or print the file of one."""
    return _print_presets(args, "models", _model_record, _MODEL_COLUMNS)


@command("clusters", _PRESET_NAME(choices=presets.clusters()), FORMAT)
def clusters_command(args: argparse.Namespace) -> int:
    """List the clusters that ship, or print the file of one."""
    return _print_presets(args, "clusters", _cluster_record, _CLUSTER_COLUMNS)


def _print_presets(
    args: argparse.Namespace, kind: str, record_of: Callable[[str], dict[str, Any]], columns: Sequence[Column]
) -> int:
    """Print all models or clusters as a table, or the file of one."""
    form, names = format_of(args), presets.preset_names(kind)
    if args.name is not None:
        if form != "text":
            raise RequestError("format", f"is of the table, but {args.name!r} is printed as its file; leave one out")
        write_stdout(presets.preset_text(kind, choose(kind.removesuffix("s"), args.name, names)))
        return 0
    records = [record_of(name) | {"about": presets.preset_comment(kind, name)} for name in names]
    rows = [each | each.get("speeds", {}) | {"about": each["about"].partition("\n")[0]} for each in records]
    write_stdout(PrintedTable(columns, rows, records).printed(form))
    return 0


def _model_record(name: str) -> dict[str, Any]:
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


def _cluster_record(name: str) -> dict[str, Any]:
    """Return what one device of a cluster does and holds, and the different links between two."""
    cluster = presets.cluster(name)
    devices = cluster.devices[0]
    known = devices.speeds.known if devices.speeds is not None else {}
    per_node = cluster.topology.per_node if cluster.topology is not None else None
    count = cluster.count or 2 * (per_node or 1)  # two nodes of one that may grow
    src, dst = np.nonzero(~np.eye(count, dtype=np.bool_))
    links = np.unique(np.stack(cluster.sized(count).link_costs(src, dst)), axis=1).T.tolist()
    return {
        "name": name,
        "devices": cluster.count,
        "memory_bytes": devices.memory,
        "speeds": {precision: known.get(precision) for precision in _SPEEDS},
        "achieved": devices.achieved,
        "topology": cluster.topology.kind if cluster.topology is not None else "edges",
        "links": [dict(zip(sorted(_LINK_UNITS, reverse=True), link, strict=True)) for link in links],
    }


def curve_arguments(of: str = "", axis: str | None = "flops", contents: str | None = "activations") -> list[Argument]:
    """Return the options of one worker's memory curve, with the defaults of its axis and its content."""
    about_contents = (
        "activations (default; with temporaries and gradients of activations), gradients (adds inputs and gradients of "
        "parameters), or constants (adds the size of the parameters once more)"
    )
    about_axis = "the measure of a layer's share of a pass: flops (default), roofline:DEVICE or measured"
    return [
        argument("--axis", default=axis, metavar="AXIS", choices=AXES, help=f"{of}{about_axis}"),
        argument("--contents", default=contents, metavar="WHAT", choices=CURVE_CONTENTS, help=f"{of}{about_contents}"),
        argument(
            "--by-layer",
            action="store_true",
            help=f"{of}count each layer at its peak throughout, even where the model has its curve",
        ),
    ]


@command(
    "superpose",
    argument(
        "model",
        metavar="NAME|FILE",
        choices=presets.models(),
        help="a model that ships with cdpsim, or a .toml or .json file",
    ),
    argument("-n", required=True, metavar="N", help="workers"),
    *curve_arguments(),
    FORMAT,
)
def superpose_command(args: argparse.Namespace) -> int:
    """Extrapolate one worker's memory to N workers (Fig. 4)."""
    result = superpose(args.model, args.n, axis=args.axis, contents=args.contents, by_layer=args.by_layer)
    paper = [f"the paper: {PAPER_CLAIMS[args.model]} (Fig. 4)"] if args.model in PAPER_CLAIMS else []
    write_stdout(PrintedTable(_CURVE_COLUMNS, [result], result.row(), notes=paper).printed(format_of(args)))
    return 0


_CURVE_COLUMNS = (
    *map(Column, ("model", "n", "axis", "contents")),
    Column("", heading="by", words=attrgetter("resolution")),
    Column("dp_bytes", attrgetter("dp"), "DP per worker", words=lambda row: bytes_text(row.dp)),
    Column("cdp_bytes", lambda row: row.row()["cdp_bytes"], "CDP per worker", words=lambda row: bytes_text(row.cdp)),
    Column("reduction", lambda row: float(row.reduction), unit="%"),
)
