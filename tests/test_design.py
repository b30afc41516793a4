"""DESIGN.md: its worked Program is the one that the package assembles, and it stays short."""

import importlib
import re
from pathlib import Path

from cdpsim import Program, Request, assemble
from cdpsim.program import Category

DESIGN = (Path(__file__).parent.parent / "DESIGN.md").read_text(encoding="utf-8")


def moment(number: int) -> str:
    """Name a moment of a program."""
    return "start of the run" if number < 0 else f"{'end' if number & 1 else 'start'} of {number >> 1}"


def node(program: Program, number: int) -> str:
    """Describe a node: where a task runs and which version it reads, or which version an update makes."""
    tasks, name = program.tasks, program.describe(number)
    if number >= len(tasks):
        return name
    if tasks.micro_batch[number] < 0:
        return f"{name} makes version {tasks.version[number]}"
    return f"{name} on device {tasks.device[number]} reads version {tasks.version[number]}"


def buffer(program: Program, number: int) -> str:
    """Describe a buffer: its content, its device, and its first and last moment."""
    held = program.buffers
    ends = [int(held.end[number]), *(int(end) for end in held.kept_until[held.kept == number])]
    content = f"{Category(int(held.category[number])).name.lower()} of stage {held.stage[number]}"
    begin = moment(int(held.begin[number]))
    return f"{content} on device {held.device[number]}: {begin} to {' and '.join(map(moment, ends))}"


def rows(program: Program) -> list[str]:
    """Write a program as DESIGN.md shows it, one line for each row, the edges in two."""
    edges = [
        f"{before} -> {after}" for before, after in sorted(zip(program.edges.before, program.edges.after, strict=True))
    ]
    lanes = [
        f"device {device}: {', '.join(map(str, program.lane_tasks[first:last]))}"
        for device, (first, last) in enumerate(zip(program.lane_start, program.lane_start[1:], strict=False))
    ]
    return [
        "nodes",
        *(f"{number:>4}  {node(program, number)}" for number in range(program.nodes)),
        "edges: the second node starts when the first has ended, or later",
        f"      {', '.join(edges[:8])},",
        f"      {', '.join(edges[8:])}",
        "lanes: the compute tasks of each device in their order",
        f"      {'; '.join(lanes)}",
        "buffers",
        *(f"{number:>4}  {buffer(program, number)}" for number in range(len(program.buffers))),
    ]


def test_the_worked_program_is_what_is_assembled() -> None:
    """Every row of the program in DESIGN.md, word by word."""
    shown = "".join(f"    {row}\n" for row in rows(assemble(Request("mp-cdp", n=2, steps=1))))
    assert shown in DESIGN


def test_a_request_becomes_a_run_by_functions_that_exist() -> None:
    """Each name of that page is in one of the modules beside it."""
    page = DESIGN.split("## How a request becomes a run")[1].split("\n## ")[0]
    rows = [re.split(r"\s{2,}", line.strip()) for line in page.splitlines() if line.startswith("    ")]
    assert len(rows) > 10
    for names, where in rows:
        modules = [importlib.import_module(f"cdpsim.{module}") for module in where.partition(":")[0].split(", ")]
        for name in names.split(", "):
            assert any(hasattr(module, name) for module in modules), name


def test_design_is_short() -> None:
    """At most 160 lines, of at most 140 characters."""
    lines = DESIGN.splitlines()
    assert len(lines) <= 160
    assert max(map(len, lines)) <= 140
