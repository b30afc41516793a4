"""Requests of the command `peers`, and its tables."""

import argparse

import msgspec
import torch

from cdpsim.cli.console import write_stdout
from cdpsim.errors import RequestError, choose, suggestion, whole_number
from cdpsim.files import tables
from cdpsim.files import writing as files
from cdpsim.files.progress import ticker

from ..comparison.battery import positive
from ..ranks.launcher import Ranks
from ..ranks.member import DEVICES
from ..report.command import percent
from ..report.environment import environment
from .comparison import TOLERANCE, Comparer, Workload, simulate_anew
from .runtimes import PEERS, Peer
from .schema import DevicePeak, PeerReport, PeersReport, category_of, read_peers, write_peers

FORMS = ("text", "markdown", "latex")
LAYERED_MODELS = ("mlp", "transformer")  # those of as many layers as there are stages


def run_peers(options: argparse.Namespace) -> int:
    """Serve a request on the command line, and return its exit code."""
    chosen = choose_peers(options.only or list(PEERS))
    if options.list:
        write_stdout(peers_list(chosen))
        return 0
    form = choose("format", options.format, FORMS)
    if options.output is not None:
        files.check_writable(options.output, force=options.force)
    report = (_run_anew if options.earlier is None else _simulated_anew)(options, chosen)
    if options.output is not None:
        write_peers(options.output, report, force=options.force)
    write_stdout(peers_table(report.peers, form) + (_verdict(report.peers) if form == "text" else ""))
    return 0 if all(own.ok for own in report.peers if own.judged) else 1


def _verdict(reports: list[PeerReport]) -> str:
    """Return what judged runtimes hold more or less where they are not within tolerance, and how many are."""
    judged = [report for report in reports if report.judged]
    lines = [line for report in judged for line in (_named(report) if report.ok else _remainders(report))]
    good = sum(report.ok for report in judged)
    lines.append(
        f"{good} of {len(judged)} judged runtimes are within {percent(TOLERANCE)} % on each rank, with what is named"
    )
    return "\n".join([*lines, ""])


def _run_anew(options: argparse.Namespace, chosen: list[Peer]) -> PeersReport:
    """Run runtimes on ranks, and return their comparisons."""
    workloads = [_workload(options, given) for given in options.n or ["4"]]
    for workload in workloads:
        _check(workload, chosen)
    repeats, timeout = whole_number("repeats", options.repeats, at_least=0), positive("--timeout", options.timeout)
    done = ticker(len(workloads) * len(chosen), "peers")
    reports: list[PeerReport] = []
    for workload in workloads:
        with Ranks(workload.ranks, device=workload.device, backend=workload.backend) as ranks:
            comparer = Comparer(ranks, workload, repeats=repeats, timeout=timeout)
            for peer in chosen:
                reports.append(comparer.compare(peer))
                done(1)
    done(0)
    return PeersReport(environment=environment(options.device), tolerance=TOLERANCE, peers=reports)


def _simulated_anew(options: argparse.Namespace, chosen: list[Peer]) -> PeersReport:
    """Return a report's runtimes with the simulation of today; times stay, as their forecast is measured too."""
    report = read_peers(options.earlier, rewritten=True)
    names = [peer.name for peer in chosen]
    ranks = None if options.n is None else [whole_number("n", given, at_least=2) for given in options.n]
    kept = [own for own in report.peers if own.name in names and (ranks is None or own.ranks in ranks)]
    if not kept:
        raise RequestError(options.earlier, "has no such runtime on so many ranks; leave out --only and -n")
    return msgspec.structs.replace(report, peers=[simulate_anew(own) for own in kept])


def choose_peers(names: list[str]) -> list[Peer]:
    """Return runtimes by their names, in the order of the list of all."""
    for name in names:
        if name not in PEERS:
            raise RequestError("--only", f"no runtime is called {name!r}; {suggestion(name, PEERS)}; see --list")
    return [peer for name, peer in PEERS.items() if name in names]


def _workload(options: argparse.Namespace, ranks: str) -> Workload:
    from ..profile.command import read_sizes

    model = choose("model", options.model, LAYERED_MODELS)
    sizes = read_sizes(options.size)
    standard = dict(Workload._field_defaults["sizes"]) if model == Workload._field_defaults["model"] else {}
    return Workload(
        whole_number("n", ranks, at_least=2),
        whole_number("m", options.m, at_least=1),
        model,
        tuple((standard | sizes).items()),
        whole_number("batch", options.batch, at_least=1),
        choose("device", options.device, DEVICES),
    )


def _check(workload: Workload, chosen: list[Peer]) -> None:
    """Refuse fewer GPUs than ranks, and fewer micro-batches than a runtime takes."""
    gpus = torch.cuda.device_count()
    if workload.device == "cuda" and gpus < workload.ranks:
        problem = f"cuda needs a GPU for each rank; there are {gpus} for {workload.ranks} ranks; use --device cpu"
        raise RequestError("--device", problem)
    for peer in chosen:
        peer.check_micro_batches(workload.ranks, workload.m)


def peers_list(chosen: list[Peer]) -> str:
    """Return a table of runtimes: what each is, and the schedule that is held against it."""
    rows = [(peer.name, peer.about, peer.schedule, "yes" if peer.judged else "no") for peer in chosen]
    return tables.as_text(("runtime", "of torch", "schedule", "judged"), rows)


def peers_table(reports: list[PeerReport], form: str) -> str:
    """Return a table with a row for each rank of each runtime, for people."""
    simulations = list(dict.fromkeys(name for report in reports for name in report.devices[0].simulated))
    columns = [column for name in simulations for column in (f"simulated, {name}", "%")]
    header = ("runtime", "ranks", "rank", "torch bytes", *columns, "messages", "parameters", "time %", "ok")
    rows = [_rank_row(report, device, simulations) for report in reports for device in report.devices]
    return tables.FORMATS[form](header, rows)


def _rank_row(report: PeerReport, device: DevicePeak, simulations: list[str]) -> list[str]:
    own = [device.simulated[name] for name in simulations]
    row = [report.name, str(report.ranks), str(device.device), str(device.bytes)]
    row += [cell for each in own for cell in (str(each.bytes), percent(each.relative_error))]
    return row + (_of_all_ranks(report) if device.device == 0 else [""] * 4)


def _of_all_ranks(report: PeerReport) -> list[str]:
    apart = report.max_abs_difference
    return [
        "same" if report.messages.same else "differ",
        "not a number" if apart is None else "bit-equal" if apart == 0 else f"within {apart:.0e}",
        percent(report.time.relative_error) if report.time else "-",
        _judgement(report),
    ]


def _judgement(report: PeerReport) -> str:
    if not report.judged:
        return "not judged"
    return ("remainder named" if report.remainder else "yes") if report.ok else "NO"


def _named(report: PeerReport) -> list[str]:
    """Return a line on the named remainder of a runtime, if it has one."""
    parts = [f"{size:,} B of {name}" for name, size in report.remainder.items()]
    text = f"{report.name}, {report.ranks} ranks: within {percent(TOLERANCE)} % with"
    return [f"{text} {', '.join(parts)}, which are not simulated"] if parts else []


def _remainders(report: PeerReport) -> list[str]:
    """Return a line for each rank that is not within tolerance: what torch holds more or less than is simulated."""
    lines = []
    for device in report.devices:
        name, own = list(device.simulated.items())[-1]
        if abs(own.relative_error) > TOLERANCE:
            parts = [_remainder_text(device, *part) for part in device.remainder(name).items()]
            lines.append(f"{report.name}, {report.ranks} ranks, rank {device.device}: {'; '.join(parts)}")
    if not report.messages.same:
        lines.append(f"{report.name}, {report.ranks} ranks: {report.messages.first_difference}")
    return lines


def _remainder_text(device: DevicePeak, category: str, size: int) -> str:
    """Return a category's difference, and what torch has of it."""
    kinds = [f"{nbytes:,} {kind}" for kind, nbytes in device.contents.items() if category_of(kind) == category]
    return f"{size:+,} B of {category}" + (f" (torch has {', '.join(kinds)})" if kinds else "")
