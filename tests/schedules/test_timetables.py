"""Golden timetables: small enough to read, and read they should be when they change."""

import re
from pathlib import Path

import pytest

from cdpsim import simulate
from cdpsim.draw.text import timetable

GOLDEN = (Path(__file__).parent / "timetables.txt").read_text(encoding="utf-8")
TABLES: dict[str, str] = {}
for part in GOLDEN.split("# ")[1:]:
    title, _, drawn = part.partition("\n")
    TABLES[title] = drawn.strip("\n")


@pytest.mark.every_case
@pytest.mark.parametrize("title", TABLES)
def test_timetable(title: str) -> None:
    """Three stages, two steps, as in the paper's Fig. 1."""
    name, _, rule = title.partition(" --rule ")
    assert timetable(simulate(name, 3, steps=2, rule=rule or None)) == TABLES[title]


@pytest.mark.every_case
@pytest.mark.parametrize("title", TABLES)
def test_the_golden_tables_are_the_paper_s(title: str) -> None:
    """Spec section 1, in closed form: F(i,j,t) = start + j and B(i,j,t) = start + 2N-1-j."""
    cyclic = "cdp" in title
    seen: dict[tuple[str, int, int], list[int]] = {}
    header, *rows = TABLES[title].splitlines()
    columns = [(m.start(), int(m[0])) for m in re.finditer(r"\d+", header)]
    for row in rows:
        for low, slot in columns:
            cell = row[low:].partition(" ")[0] if row[low - 1 : low] == " " else ""
            for kind, i, j in re.findall(r"([FB])(\d)\.(\d)", cell):
                seen.setdefault((kind, int(i), int(j)), []).append(slot)
    expected = {
        (kind, i, j): [6 * t + 2 * i * cyclic + (j if kind == "F" else 5 - j) for t in range(2)]
        for kind in "FB"
        for i in range(3)
        for j in range(3)
    }
    assert {task: sorted(slots) for task, slots in seen.items()} == expected
