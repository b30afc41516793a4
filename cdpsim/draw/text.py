"""A timetable in plain text: the tasks of a small schedule, slot by slot."""

from cdpsim.trace import Trace


def timetable(trace: Trace) -> str:
    """Draw a row per device and a column per slot; `F1.0` is the forward of micro-batch 1 on stage 0.

    For runs under unit costs. Tasks of a device in one slot are joined by `+`; a task that reads an older version
    than the newest is marked with `/`, as in the paper's Fig. 1.
    """
    cells: dict[tuple[int, int], list[str]] = {}
    names = ("kind", "micro_batch", "stage", "stale", "device", "start")
    for kind, i, j, stale, device, start in zip(*(trace.tasks[name].tolist() for name in names), strict=True):
        if kind != "U":
            cells.setdefault((device, start), []).append(f"{kind}{i}.{j}{'/' if stale else ''}")
    slots = 1 + max(slot for _, slot in cells)
    devices = 1 + max(device for device, _ in cells)
    header = ["slot", *map(str, range(slots))]
    rows = [[str(device), *("+".join(cells.get((device, s), [])) for s in range(slots))] for device in range(devices)]
    widths = [max(len(row[c]) for row in [header, *rows]) for c in range(slots + 1)]
    return "\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in [header, *rows])
