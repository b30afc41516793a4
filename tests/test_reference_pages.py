"""The reference pages of files: each field and column that the code has, with its range and default, and no other."""

import importlib
import re
import string
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cdpsim
from cdpsim import Request, cli, simulate
from cdpsim.cli import main
from cdpsim.cluster import _ClusterFile
from cdpsim.cluster.disorder import Disorder, Slow, Stop
from cdpsim.cluster.topology import (
    TOPOLOGY_FIELDS,
    Cable,
    Devices,
    Edge,
    Kernels,
    Link,
    MeasuredWith,
    PairLink,
    Speeds,
    Topology,
    Workspace,
)
from cdpsim.files import units
from cdpsim.files.config import ConfigTable
from cdpsim.model import Recipe, Runtime, Tie, _ModelFile, _RepeatedStage
from cdpsim.model.curve import MemoryCurve, OperatorSteps
from cdpsim.model.layers import Layers
from cdpsim.program import Category, Content, Op, Stream
from cdpsim.request.options import OPTION_NAMES
from cdpsim.request.sharing import option_words
from cdpsim.schedules import Schedule
from cdpsim.studies.sweep.points import MOST_SWEPT_POINTS, AxisTable, SweepFile
from cdpsim.studies.sweep.questions import question_names
from cdpsim.trace import EXCHANGES_HEADER, ROUNDS_HEADER, RUNS_HEADER, TABLES, WIDER_TABLES, names_of
from tests.helpers.command_options import load_extension
from tests.helpers.field_tables import PAGES, require_fields, tables
from tests.helpers.profiles import profiled

MODEL_FILES: dict[str, type[msgspec.Struct]] = {
    "The top level": _ModelFile,
    "`[layers]`": Layers,
    "`[[stages]]`": _RepeatedStage,
    "`[training]`": Recipe,
    "`[runtime]`": Runtime,
    "`[[tied]]`": Tie,
    "`[stages.curve]`": MemoryCurve,
    "`[stages.curve.forward]`, `[stages.curve.backward]`": OperatorSteps,
}
CLUSTER_FILES: dict[str, type[msgspec.Struct]] = {
    "The top level of a cluster": _ClusterFile,
    "`[devices]`": Devices,
    "`[devices.speeds]`": Speeds,
    "`[devices.kernels]`": Kernels,
    "`[devices.workspace]`": Workspace,
    "`[link]`": Link,
    "`[[links]]`": PairLink,
    "`[topology]`": Topology,
    "Cables: `[topology.link]`, `[topology.host]`, `[topology.network]`": Cable,
    "`[[edges]]`": Edge,
    "`[disorder]`": Disorder,
    "`[[disorder.slow]]`": Slow,
    "`[[disorder.stop]]`": Stop,
    "`[measured_with]`": MeasuredWith,
}


@pytest.mark.parametrize(("page", "forms"), [("model-files.md", MODEL_FILES), ("cluster-files.md", CLUSTER_FILES)])
def test_a_page_has_every_field_of_its_files(page: str, forms: dict[str, type[msgspec.Struct]]) -> None:
    require_fields(page, forms)


def of_package(form: type[ConfigTable]) -> Iterator[type[ConfigTable]]:
    """All kinds of tables that are derived from one, and those derived from them."""
    for kind in form.__subclasses__():
        yield from (kind, *of_package(kind))


def test_every_table_of_model_and_cluster_files_is_on_a_page() -> None:
    """All but what files have as another type, `Model` and its facts, `Stage` and `Cluster`, and clusters of groups."""
    kinds = {kind for kind in of_package(ConfigTable) if kind.__module__.startswith("cdpsim.")}
    elsewhere = {kind.__name__ for kind in kinds - {*MODEL_FILES.values(), *CLUSTER_FILES.values()}}
    assert elsewhere == {"_ModelFacts", "Model", "Stage", "Cluster", "_Teams"}


def test_kinds_of_topologies_have_the_fields_of_the_page() -> None:
    rows = tables("cluster-files.md")["`[topology]`"][1]
    assert {kind.strip("`"): tuple(re.findall(r"`(.*?)`", fields)) for kind, fields in rows} == TOPOLOGY_FIELDS


def test_quantities_have_the_units_and_bounds_of_the_page() -> None:
    kinds = {"time": units._TIME, "size": units._SIZE, "speed": units._SPEED, "bandwidth": units._BANDWIDTH}
    rows = {
        name: (", ".join(kind.units), f"{kind.least:g}", f"{kind.most:g}", f"`{kind.example}`")
        for name, kind in kinds.items()
    }
    time, work = units._DURATION, units._WORK
    assert time.least == work.least
    most = f"{time.most:g} {time.units[0]}, {work.most:g} {work.units[0]}"
    rows["time or work"] = ("s, FLOP", f"{time.least:g}", most, f"`{time.example}`, `{work.example}`")
    rows["bandwidth"] = (*rows["bandwidth"][:2], f"{rows['bandwidth'][2]}, or `inf`", rows["bandwidth"][3])
    assert {name: tuple(rest) for name, *rest in tables("quantities.md")["Quantities"][0]} == rows


def test_prefixes_are_those_of_the_page() -> None:
    """All letters are tried."""
    text = (PAGES / "quantities.md").read_text(encoding="utf-8").partition("Prefixes are")[2]
    decimal, _, binary = text.partition("Sizes and bandwidths take")
    accepted = {letter for letter in "µ" + string.ascii_letters if amount_with(letter)}
    assert set(re.findall("`(.)`", decimal)) == accepted
    powers = re.findall("`(.i)`", binary.partition(":")[0])
    assert [amount_with(prefix) for prefix in powers] == [1024**k for k in range(1, len(powers) + 1)]
    assert units.size_bytes("16 MiB") == 16_777_216


def amount_with(prefix: str) -> float | None:
    """Return the bytes of one unit with a prefix, if there is one."""
    try:
        return units._parse(f"1 {prefix}B", units._SIZE._replace(most=1e40))[0]
    except cdpsim.RequestError:
        return None


def test_experiment_files_have_every_option_and_its_default() -> None:
    """The page has the table that the documentation's own extension writes from the rows."""
    pytest.importorskip("sphinx")
    page = (PAGES / "experiment-files.md").read_text(encoding="utf-8")
    assert page.count("```{request-options}\n```\n") == 1
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in load_extension().request_lines()]
    assert [row[0].strip("`") for row in rows[2:]] == list(OPTION_NAMES)
    assert {len(row) for row in rows} == {3}
    defaults = {name.strip("`"): default for name, default, _ in rows[2:]}
    assert defaults["schedule"] == "required"
    assert defaults["n"] == defaults["m"] == defaults["slow"] == "–"
    assert (defaults["replicas"], defaults["clip"], defaults["engine"]) == ("1", "false", "`auto`")


def test_the_page_of_sweeps_has_every_field_question_and_code() -> None:
    fields, axis = tables("sweeps.md")["The file of a sweep"]
    assert tuple(row[0].strip("`") for row in fields) == SweepFile.__struct_encode_fields__
    assert re.findall("`(.*?)`", fields[0][1]) == question_names()
    named = {word for row in axis for word in re.findall("`(.*?)`", row[0])}
    assert named == {*AxisTable.__struct_encode_fields__}
    page = (PAGES / "sweeps.md").read_text(encoding="utf-8")
    assert f"at most {MOST_SWEPT_POINTS:,} points" in page


@pytest.mark.parametrize("table", TABLES)
def test_a_csv_file_has_the_columns_of_the_page(table: str) -> None:
    rows = tables("trace-files.md")[f"`{table}.csv`"][0]
    assert tuple(row[0].strip("`") for row in rows) == TABLES[table]
    words = {"op": Op, "content": Content, "category": Category}
    for column, value, _ in rows:
        if kinds := words.get(column.strip("`")):
            assert re.findall("`(.*?)`", value) == names_of(kinds).tolist()


@pytest.mark.parametrize("table", WIDER_TABLES)
def test_wider_files_have_the_columns_of_the_page(table: str) -> None:
    plain, more = tables("trace-files.md")[f"`{table}.csv`"]
    assert tuple(row[0].strip("`") for row in (*plain, *more)) == WIDER_TABLES[table]


def test_messages_are_in_the_streams_of_the_page() -> None:
    _, more = tables("trace-files.md")["`messages.csv`"]
    assert re.findall("`(.*?)`", more[-1][1]) == names_of(Stream).tolist()


@pytest.mark.parametrize(
    ("file", "header"), [("runs.csv", RUNS_HEADER), ("rounds.csv", ROUNDS_HEADER), ("exchanges.csv", EXCHANGES_HEADER)]
)
def test_files_beside_them_have_the_columns_of_the_page(file: str, header: str) -> None:
    rows = tables("trace-files.md")[f"`{file}`"][0]
    assert ",".join(row[0].strip("`") for row in rows) + "\n" == header


def test_summaries_have_the_fields_of_the_page(tmp_path: Path) -> None:
    """Those of a run of each kind together, in the order in which they come."""
    model: dict[str, Any] = {"model": profiled("gpt2"), "cluster": "a100-nodes", "steps": 2}
    command = ["simulate", "multi-dp", "-n", "2", "--model", "gpt2", "--cluster", "a100-nodes"]
    assert main([*command, "--jitter", "lognormal:0.1", "--runs", "2", "-o", str(tmp_path / "runs")]) == 0
    random = cdpsim.load(tmp_path / "runs").summary()
    shorter = model | {"steps": 1}  # than what a steady state takes
    runs = [simulate("pipemare", 3), simulate("pp-cdp", 4, **shorter), simulate("zero-dp", 2, offload="all", **model)]
    runs.append(simulate("1f1b", 2, shard=2, **model))
    shape: dict[str, Any] = {"model": "megatron-1.7b", "cluster": "selene", "tensor": 8, "ignore_memory": True}
    runs.append(simulate("1f1b", 2, steps=2, **shape))
    always = set.intersection(*(set(run.summary()) for run in runs))
    fields = set(random).union(*(run.summary() for run in runs))
    summary, quantiles = tables("trace-files.md")["`summary.json`"]
    assert {row[0].strip("`") for row in summary} == fields
    assert {row[0].strip("`") for row in summary if not re.search("; only ", row[2])} == always
    assert (
        [row[0].strip("`") for row in quantiles] == list(random["runs"]["period"]) == list(random["runs"]["makespan"])
    )
    assert [*runs[0].summary()["peak_memory"][0]] == ["device", *names_of(Category).tolist(), "total"]
    assert [*runs[0].summary()["bytes_sent"][0]] == [*runs[2].summary()["host_memory"][0]] == ["device", "bytes"]


def test_the_page_of_options_has_every_command() -> None:
    page = (PAGES / "options.md").read_text(encoding="utf-8")
    commands = [command.name for command in cli.COMMANDS]
    assert re.findall("^## (.*)$", page, re.MULTILINE) == commands
    assert re.findall(r"^```\{options\} (.*)$", page, re.MULTILINE) == commands


@pytest.mark.parametrize("name", [command.name for command in cli.COMMANDS])
def test_the_options_of_a_command_are_those_of_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As `--help-all` prints them, but for spaces; the page has those of all commands once, above."""
    pytest.importorskip("sphinx")
    extension = load_extension()
    lines = "\n".join(extension.option_lines(extension.parsers()[name]))
    main([name, "--help-all"])
    printed = re.findall(r"^  (-.*(?:\n {10,}\S.*)*)", capsys.readouterr().out, re.MULTILINE)
    entries = re.findall("^`(-.*)`\n: (.*)$", lines, re.MULTILINE)
    page = (PAGES / "options.md").read_text(encoding="utf-8")
    common = re.findall("^`(-.*)`\n: (.*)$", page, re.MULTILINE)
    assert len(common) == 4
    assert {"".join("".join(entry).split()) for entry in [*entries, *common]} == {"".join(e.split()) for e in printed}


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = (PAGES / "python-api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"cdpsim\.(\w+)(?![\w.])", page))
    assert named >= set(cdpsim.__all__)
    for module, name in re.findall(r"^\.\. auto\w+:: (cdpsim(?:\.\w+)*)\.(\w+)$", page, re.MULTILINE):
        assert hasattr(importlib.import_module(module), name)


def options_of(schedule: Schedule) -> str:
    """Return the cell of the options that a schedule takes."""
    return ", ".join(f"`{option}`" for option in option_words(schedule)) or "–"


def test_the_page_of_schedules_has_each_with_its_options_and_the_paper_s_page() -> None:
    rows = tables("schedules.md")["Schedules"][0]
    missing = [
        f"| `{s.name}` | {s.about} | {options_of(s)} | [the heading of its page](../papers/its-page.md) |"
        for s in cdpsim.SCHEDULES.values()
        if not any(row[0] == f"`{s.name}`" for row in rows)
    ]
    assert not missing, "rows for docs/reference/schedules.md, in the registry's order:\n" + "\n".join(missing)
    assert [(name, about) for name, about, *_ in rows] == [(f"`{s.name}`", s.about) for s in cdpsim.SCHEDULES.values()]
    for name, _, options, page in rows:
        schedule = cdpsim.SCHEDULES[name.strip("`")]
        assert options == options_of(schedule)
        title, file = re.findall(r"\[(.*)\]\((.*)\)", page)[0]
        text = (PAGES / file).read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n")
        assert name in text, f"docs/reference/{file} says nothing of {name}"


def examples_of(page: str) -> list[str]:
    """Return what a page shows as the content of a file: TOML, and lists of CSV that stand indented."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL) + [
        textwrap.dedent(rows) for rows in re.findall(r"^\n((?:    \S.*\n)+)", text, re.MULTILINE)
    ]


def test_files_of_the_pages_load_and_run(tmp_path: Path) -> None:
    shown = [*examples_of("model-files.md"), *examples_of("cluster-files.md"), *examples_of("experiment-files.md")]
    names = ["toy.toml", "small.toml", "box.toml", "experiment.toml", "order.csv", "rule.csv"]
    for name, content in zip(names, shown, strict=True):
        (tmp_path / name).write_text(content, encoding="utf-8")
    toy, small, box, experiment, order, rule = (tmp_path / name for name in names)
    assert simulate("1f1b", model=toy, cluster=box).devices == 4
    assert simulate("1f1b", 2, model=small, cluster="selene", tensor=4, sequence=True).devices == 2
    assert simulate(Request.load(experiment)).devices == 8
    assert simulate(str(order), steps=1).makespan == 6
    assert simulate("multi-cdp", 3, rule=str(rule)).tasks == simulate("multi-cdp", 3, rule="cdp-v2").tasks
