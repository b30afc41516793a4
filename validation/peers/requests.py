"""Requests of the command `peers`, and its tables."""

import argparse
from collections import defaultdict
from itertools import chain, groupby

import msgspec
import torch

from cdpsim.cli.console import write_stdout
from cdpsim.errors import RequestError, choose, suggestion, whole_number
from cdpsim.files import tables
from cdpsim.files import writing as files
from cdpsim.files.notes import ticker

from ..comparison.battery import positive
from ..profile.command import TYPES, read_sizes
from ..ranks.launcher import Ranks
from ..ranks.member import DEVICES
from ..report.command import percent
from ..report.environment import environment
from ..report.schema import DevicePeak, PeerReport, PeersReport, category_of, read_peers, write_report
from .comparison import STANDARD, TOLERANCE, Comparer, Workload, simulate_anew
from .runtimes import PEERS, Peer

# Sizes of the models that have as many layers as there are stages.
STANDARD_SIZES: dict[str, dict[str, int]] = {"transformer": dict(STANDARD.sizes), "mlp": {"width": 256}}


def run_peers(options: argparse.Namespace) -> int:
    """Serve a request on the command line, and return its exit code."""
    chosen = choose_peers(options.only or list(PEERS))
    if options.list:
        rows = [(peer.name, peer.about, peer.schedule) for peer in chosen]
        write_stdout(tables.as_text(("runtime", "of torch", "schedule"), rows))
        return 0
    form = choose("format", options.format, tables.DATA_FORMATS)
    if options.output is not None:
        files.check_writable(options.output, force=options.force)
    report = (_run_anew if options.earlier is None else _simulated_anew)(options, chosen)
    if options.output is not None:
        write_report(options.output, report, force=options.force)
    write_stdout(peers_table(report.peers, form) + (_verdict(report.peers) if form == "text" else ""))
    return 0 if all(own.ok for own in report.peers) else 1


def _verdict(reports: list[PeerReport]) -> str:
    """Return lines on the bytes of runtimes that are not within tolerance, and the number of the others."""
    lines = [line for report in reports for line in (_named(report) if report.ok else _remainders(report))]
    good, share = sum(report.ok for report in reports), percent(TOLERANCE)
    lines.append(f"{good} of {len(reports)} runtimes are within {share} % on each rank, with what is named")
    return "\n".join([*lines, ""])


def _run_anew(options: argparse.Namespace, chosen: list[Peer]) -> PeersReport:
    models = options.model or [STANDARD.model]
    runs = [[_workload(options, given, model) for model in models] for given in options.n or [str(STANDARD.ranks)]]
    for workload in chain(*runs):
        _check(workload, chosen)
    repeats, timeout = whole_number("repeats", options.repeats, at_least=0), positive("--timeout", options.timeout)
    done = ticker(len(runs) * len(models) * len(chosen), "peers")
    reports: list[PeerReport] = []
    for (first, *_), workloads in zip(runs, runs, strict=True):
        with Ranks(first.ranks, device=first.device, backend=first.backend) as ranks:
            for workload in workloads:
                comparer = Comparer(ranks, workload, repeats=repeats, timeout=timeout)
                for peer in chosen:
                    reports.append(comparer.compare(peer))
                    done(1)
    done(0)
    return PeersReport(environment=environment(options.device), tolerance=TOLERANCE, peers=reports)


def _simulated_anew(options: argparse.Namespace, chosen: list[Peer]) -> PeersReport:
    report = read_peers(options.earlier, rewritten=True)
    names = [peer.name for peer in chosen]
    ranks = None if options.n is None else [whole_number("n", given, at_least=2) for given in options.n]
    kept = [own for own in report.peers if own.name in names and (ranks is None or own.ranks in ranks)]
    kept = [own for own in kept if options.model is None or own.request.model in options.model]
    if not kept:
        raise RequestError(options.earlier, "has no such runtime on so many ranks; leave out --only, --model and -n")
    return msgspec.structs.replace(report, peers=[simulate_anew(own) for own in kept])


def choose_peers(names: list[str]) -> list[Peer]:
    """Return runtimes by their names, in the order of the list of all."""
    for name in names:
        if name not in PEERS:
            raise RequestError("--only", f"no runtime is called {name!r}; {suggestion(name, PEERS)}; see --list")
    return [peer for name, peer in PEERS.items() if name in names]


def _workload(options: argparse.Namespace, ranks: str, model: str) -> Workload:
    sizes = read_sizes(options.size)
    return Workload(
        whole_number("n", ranks, at_least=2),
        whole_number("m", options.m, at_least=1),
        model,
        tuple((STANDARD_SIZES.get(model, {}) | sizes).items()),
        whole_number("batch", options.batch, at_least=1),
        choose("device", options.device, DEVICES),
        choose("dtype", options.dtype, TYPES),
    )


def _check(workload: Workload, chosen: list[Peer]) -> None:
    """Refuse fewer GPUs than ranks, fewer micro-batches than a runtime takes, and a model that has no such stages."""
    gpus = torch.cuda.device_count()
    if workload.device == "cuda" and gpus < workload.ranks:
        problem = f"cuda needs a GPU for each rank; there are {gpus} for {workload.ranks} ranks; use --device cpu"
        raise RequestError("--device", problem)
    for peer in chosen:
        peer.check_micro_batches(workload.ranks, workload.m)
        workload.case(peer)


def peers_table(reports: list[PeerReport], form: str) -> str:
    """Return a table with a row for each rank; for people, alike ranks of a runtime have one row."""
    simulations = list(dict.fromkeys(name for report in reports for name in report.devices[0].simulated))
    if form != "text":
        records = [_record(report, device, simulations) for report in reports for device in report.devices]
        return tables.format_table(form, records, [*records[0]], [[*record.values()] for record in records])
    columns = [column for name in simulations for column in (f"simulated, {name}", "%")]
    header = ["runtime", "ranks", "rank", "torch bytes", *columns, "messages", "parameters", "time %", "ok"]
    rows = [(report, row) for report in reports for row in _rank_rows(report, simulations)]
    if len({report.request.model for report in reports}) > 1:
        header.insert(1, "model")
        rows = [(report, [row[0], report.request.model, *row[1:]]) for report, row in rows]
    return tables.as_text(header, [row for _, row in rows])


def _record(report: PeerReport, device: DevicePeak, simulations: list[str]) -> dict[str, object]:
    """Return the cells of a rank for programs; errors are shares."""
    simulated = {
        f"{what}, {name}": value
        for name in simulations
        for own in [device.simulated[name]]
        for what, value in (("simulated", own.bytes), ("error", own.relative_error))
    }
    return {
        "runtime": report.name,
        "model": report.request.model,
        "ranks": report.ranks,
        "rank": device.device,
        "torch bytes": device.bytes,
        **simulated,
        "messages": "same" if report.messages.same else "differ",
        "parameters": report.max_abs_difference,
        "time": report.time.relative_error if report.time else None,
        "ok": report.ok,
    }


def _rank_rows(report: PeerReport, simulations: list[str]) -> list[list[str]]:
    def cells_of(device: DevicePeak) -> list[str]:
        own = [device.simulated[name] for name in simulations]
        return [str(device.bytes), *(cell for each in own for cell in (str(each.bytes), percent(each.relative_error)))]

    rows: list[list[str]] = []
    for cells, group in groupby(report.devices, key=cells_of):
        ranks = [device.device for device in group]
        those = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        of_all = [""] * 4 if rows else _of_all_ranks(report)
        rows.append([report.name, str(report.ranks), those, *cells, *of_all])
    return rows


def _of_all_ranks(report: PeerReport) -> list[str]:
    apart = report.max_abs_difference
    named = report.remainder or any(device.remainder for device in report.devices)
    return [
        "same" if report.messages.same else "differ",
        "not a number" if apart is None else "bit-equal" if apart == 0 else f"within {apart:.0e}",
        percent(report.time.relative_error) if report.time else "-",
        "NO" if not report.ok else "remainder named" if named else "yes",
    ]


def _named(report: PeerReport) -> list[str]:
    """Return a line on each named remainder of a runtime, of all its ranks or of one."""
    lines = []
    for where, parts in [("", report.remainder), *((f", rank {own.device}", own.remainder) for own in report.devices)]:
        named = ", ".join(f"{size:,} B of {name}" for name, size in parts.items())
        within = f"{_title(report)}{where}: within {percent(TOLERANCE)} %"
        lines += [f"{within} with {named}, which are not simulated"] * bool(parts)
    return lines


def _title(report: PeerReport) -> str:
    return f"{report.name}, {report.request.model}, {report.ranks} ranks"


def _remainders(report: PeerReport) -> list[str]:
    """Return a line for each rank that is not within tolerance: torch's bytes beyond the simulation's, by category."""
    lines = []
    for device in report.devices:
        name, own = list(device.simulated.items())[-1]
        if abs(own.relative_error) > TOLERANCE:
            kinds: dict[str, list[str]] = defaultdict(list)
            for kind, nbytes in device.contents.items():
                kinds[category_of(kind)].append(f"{nbytes:,} {kind}")
            has = {category: f" (torch has {', '.join(words)})" for category, words in kinds.items()}
            parts = [f"{size:+,} B of {each}{has.get(each, '')}" for each, size in device.difference(name).items()]
            lines.append(f"{_title(report)}, rank {device.device}: {'; '.join(parts)}")
    if not report.messages.same:
        lines.append(f"{_title(report)}: {report.messages.first_difference}")
    return lines
