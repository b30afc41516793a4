"""CSV for programs: each number is the one that JSON has, in SI units, to its last digit."""

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cdpsim.studies.comparison import MEASURED_COLUMNS
from tests.conftest import Command

REAL = "--model toy.toml --cluster box.toml"
COMPARED = {column.name: name.replace("-", "_") for name, column in MEASURED_COLUMNS.items()}
PEOPLE = re.compile(r"-?[0-9.]+(e-?[0-9]+)? ?([a-zA-Zµ]*(B|s|FLOP|FLOPS)(/s)?|%|/s)|yes|no|never|any|-")
COMMANDS = [
    f"compare multi-dp multi-cdp mp-cdp {REAL}",
    "compare multi-dp multi-cdp pp-cdp -n 4",
    f"compare multi-dp pp-cdp {REAL} --jitter uniform:0.2 --runs 5",
    f"import-schedule mine.csv {REAL}",
    "import-schedule mine.csv",
    f"breakeven multi-dp multi-cdp {REAL}",
    f"breakeven multi-dp {REAL} --over bandwidth",
    "breakeven single-dp multi-dp --model toy.toml --cluster slow.toml",
    "superpose vit-b16 -n 32",
    "models",
    "clusters",
    "mesh -n 2 --tensor 2 --replicas 2 --model llama2-13b --cluster a100-nodes",
    "pyramid -n 4",
]


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of JSON by the headings of CSV."""
    values = dict(row)
    values |= values.pop("steps", None) or {}
    values |= values.pop("speeds", {})
    if links := values.pop("links", None):
        values |= {name: "|".join(repr(link[name]) for link in links) for name in links[0]}
    values["about"] = values.get("about", "").partition("\n")[0]
    shorter = {re.sub("_(bytes|flop)$", "", name): value for name, value in values.items()}
    values |= {name.replace("_", "-"): value for name, value in (shorter | values).items()} | shorter
    return values | {heading: values[field] for heading, field in COMPARED.items() if field in values}


def _rows(command: Command, line: str) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """The same rows from CSV and from JSON."""
    outcome = command(*line.split(), "--format", "csv")
    said = json.loads(command(*line.split(), "--format", "json").out)
    assert outcome.code == 0
    if line.startswith("import-schedule"):
        (name, _), *cells = csv.reader(io.StringIO(outcome.out))
        assert name == said["schedule"]
        return [dict(cells)], [_numbers(said)]
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    if line.startswith("pyramid"):
        stages = [stage | {"path cover": stage["path_cover"]} for stage in said["stages"]]
        sums = {name: sum(stage[name] for stage in stages) for name in stages[0]}
        return rows, [*stages, sums | {"stage": "all"}]
    return rows, [_numbers(row) for row in (said if isinstance(said, list) else [said])]


@pytest.mark.parametrize("line", COMMANDS)
def test_csv_has_the_numbers_of_json(line: str, command: Command, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(toy)
    (toy / "slow.toml").write_text('[link]\nlatency = "9 s"\nbandwidth = "3 GB/s"\n')  # which no bandwidth hides
    assert command("timeline", "1f1b", "-n", 3, "-o", "mine.csv").code == 0
    rows, values = _rows(command, line)
    assert len(rows) == len(values) > 0
    for row, numbers in zip(rows, values, strict=True):
        for heading, cell in row.items():
            value = numbers[heading]
            if isinstance(value, str):
                assert cell.removeprefix("'") == value  # which keeps a minus from being a formula
            else:
                assert (json.loads(cell) if cell else None) == value, heading
            assert not PEOPLE.fullmatch(cell), heading


def test_people_still_read_units(command: Command, toy: Path) -> None:
    line = ["compare", "multi-dp", "--model", toy / "toy.toml", "--cluster", toy / "box.toml", "--columns", "all"]
    line.append("--format")
    for form in ("text", "latex"):
        assert re.search(r"[0-9.]+ s\b.* [0-9.]+ \\?%.* [0-9.]+ GB\b", command(*line, form).out)
