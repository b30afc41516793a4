"""Tables of docs/results.md that sum up what is kept in validation/results."""

from collections import defaultdict
from pathlib import Path

import msgspec

from cdpsim.files.tables import as_text
from validation.report.command import percent
from validation.report.schema import Battery, PeerReport, Report, read_peers

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "validation" / "results"
PAGE = PROJECT / "docs" / "results.md"


def replays_table() -> str:
    """A row for each battery, model, and way to run its devices."""
    rows = []
    for path in sorted(RESULTS.glob("battery*.json")):
        groups: dict[tuple[str, str], list[Report]] = defaultdict(list)
        for report in msgspec.json.decode(path.read_bytes(), type=Battery).reports:
            groups[report.asked.model, "one process" if report.asked.single_process else "ranks"].append(report)
        rows += [[path.stem, *group, *_summed(reports)] for group, reports in sorted(groups.items())]
    return as_text(("results", "model", "in", "replays", "ok", "off %", "unnamed B", "bit-equal"), rows)


def _summed(reports: list[Report]) -> list[str]:
    accounts = [own for each in reports if each.allocator for own in each.allocator.processes]
    off = max(abs(each.memory.max_relative_error) for each in reports)
    unnamed = max(own.largest_difference for own in accounts)
    good, equal = (
        sum(values) for values in zip(*((each.ok, each.parameters.bit_equal) for each in reports), strict=True)
    )
    return [str(len(reports)), str(good), percent(off), str(unnamed), str(equal)]


def peers_summary() -> str:
    """A row for each runtime on four ranks that trained a transformer."""
    reports = [own for path in sorted(RESULTS.glob("peers*.json")) for own in read_peers(path).peers]
    rows = [_of_peer(own) for own in reports if (own.ranks, own.request.model) == (4, "transformer")]
    return as_text(("runtime", "simulated as", "paper %", "torch %", "messages", "parameters", "result"), rows)


def _of_peer(report: PeerReport) -> list[str]:
    errors = [[own.simulated[name].relative_error for own in report.devices] for name in ("paper", "torch")]
    apart = report.max_abs_difference
    said = "bit-equal" if apart == 0 else f"within {apart:.0e}"
    named = report.remainder or any(own.remainder for own in report.devices)
    result = "NO" if not report.ok else "remainder named" if named else "ok"
    same = "same" if report.messages.same else "differ"
    return [report.name, report.schedule, *(percent(max(own, key=abs)) for own in errors), same, said, result]


if __name__ == "__main__":
    print(replays_table(), peers_summary(), sep="\n", end="")
