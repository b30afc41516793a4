"""The files of a run say what the run was: read back the same, byte for byte the same, in the promised order."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from cdpsim import SCHEDULES, Model, RequestError, Stage, Trace, __version__, load, simulate
from cdpsim.program import Op
from tests.helpers.strategies import requests

HEADERS = {
    "tasks": "kind,stage,micro_batch,step,device,start,end,version,stale",
    "messages": "op,content,stage,micro_batch,step,src,dst,size,start,end,rounds",
    "memory": "device,category,time,size",
}
STREAM_COLUMNS = ",stages,stream"  # of messages, in runs that have streams
TABLES = list(HEADERS)
FILES = [*(f"{name}.csv" for name in TABLES), "summary.json"]
PAPER = ["single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp"]

each_schedule = pytest.mark.parametrize("name", PAPER)
each_cost = pytest.mark.parametrize("real", [False, True], ids=["unit", "real"])


def trace_of(name: str, toy: Path, real: bool, **options: Any) -> Trace:
    """A run of three stages in slots, or with the uneven model and cluster."""
    if real:
        options |= {"model": str(toy / "toy.toml"), "cluster": str(toy / "box.toml")}
    return simulate(name, 3, **options)


def saved(trace: Trace, folder: Path) -> dict[str, bytes]:
    """The files that a trace is saved in."""
    trace.save(folder)
    return {file: (folder / file).read_bytes() for file in FILES}


def rows(content: bytes) -> list[dict[str, str]]:
    """The rows of a file."""
    return list(csv.DictReader(io.StringIO(content.decode())))


def assert_same(one: Trace, other: Trace) -> None:
    """Equal columns of equal kinds, and equal summaries."""
    for table in TABLES:
        left, right = getattr(one, table), getattr(other, table)
        more = STREAM_COLUMNS if "stream" in left else ",base,estimate" if "estimate" in left else ""
        assert list(left.keys()) == list(right.keys()) == (HEADERS[table] + more).split(",")
        for name in left.keys():  # noqa: SIM118 - a loop over a table goes over its rows
            assert left[name].tolist() == right[name].tolist(), (table, name)
            # Whether an empty column has integers or floats is nothing that a file can say.
            assert len(left[name]) == 0 or left[name].dtype.kind == right[name].dtype.kind, (table, name)
    assert one == other


# The same again


@pytest.mark.every_case
@each_schedule
@each_cost
def test_saving_and_loading_is_the_identity(name: str, real: bool, toy: Path) -> None:
    """Also for a trace that was itself loaded."""
    trace = trace_of(name, toy, real)
    files = saved(trace, toy / "a")
    loaded = load(toy / "a")
    assert_same(trace, loaded)
    assert saved(loaded, toy / "b") == files


@given(requests())
def test_whatever_the_request_saving_and_loading_is_the_identity(request: dict[str, Any]) -> None:
    """Sizes of all magnitudes, times with all their digits."""
    trace = simulate(**request)
    with TemporaryDirectory() as folder:
        files = saved(trace, Path(folder) / "a")
        assert_same(trace, load(Path(folder) / "a"))
        assert saved(load(str(Path(folder) / "a")), Path(folder) / "b") == files


@pytest.mark.every_case
@each_schedule
@each_cost
def test_both_engines_write_the_same_bytes(name: str, real: bool, toy: Path) -> None:
    files = [saved(trace_of(name, toy, real, engine=engine), toy / engine) for engine in ("auto", "fast", "simpy")]
    assert files[0] == files[1] == files[2]


ALL_NINE = """
import sys
from cdpsim import simulate
folder, model, cluster, *names = sys.argv[1:]
for name in names:
    simulate(name, 4, steps=2).save(f"{folder}/{name}-unit")
    simulate(name, model=model, cluster=cluster, engine="simpy").save(f"{folder}/{name}-real")
"""


@pytest.mark.slow
def test_the_hash_seed_changes_no_byte(toy: Path) -> None:
    contents = []
    for seed in ("0", "1", "4242"):
        folder = toy / seed
        folder.mkdir()
        arguments = [str(folder), str(toy / "toy.toml"), str(toy / "box.toml"), *PAPER]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", ALL_NINE, *arguments], env=environment, check=True)
        contents.append({str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    assert len(contents[0]) == 2 * len(PAPER) * len(FILES)
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.every_case
@each_schedule
@each_cost
def test_rows_are_written_and_read_in_parts_of_any_size(
    name: str, real: bool, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where destinations are single devices in one part and groups in another."""
    trace = trace_of(name, toy, real)
    files = saved(trace, toy / "whole")
    for size in (1, 7):
        monkeypatch.setattr("cdpsim.trace._ROWS_OF_A_CHUNK", size)
        assert saved(trace, toy / str(size)) == files
        assert_same(trace, load(toy / str(size)))


# Content of the files


@pytest.mark.every_case
@each_schedule
@each_cost
def test_headers_and_orders_are_the_contract_s(name: str, real: bool, toy: Path) -> None:
    files = saved(trace_of(name, toy, real), toy / "out")
    for table, header in HEADERS.items():
        assert files[f"{table}.csv"].decode().splitlines()[0] == header
        assert files[f"{table}.csv"].endswith(b"\n")
        assert b"\r" not in files[f"{table}.csv"]
        assert b'"' not in files[f"{table}.csv"]

    def number(cell: str) -> float:
        return float(cell) if cell else -1

    def task(row: dict[str, str]) -> list[Any]:
        keys = ("step", "micro_batch", "stage")
        return [number(row["start"]), int(row["device"]), "UFBW".index(row["kind"]), *(number(row[k]) for k in keys)]

    def message(row: dict[str, str]) -> list[Any]:
        cells = [number(row[k]) for k in ("stage", "micro_batch", "step", "src")]
        to = [int(device) for device in row["dst"].split("|")]
        return [number(row["start"]), row["op"], row["content"], *cells, to, number(row["size"]), number(row["end"])]

    def held(row: dict[str, str]) -> list[Any]:
        return [int(row["device"]), row["category"], number(row["time"])]

    for table, key in (("tasks", task), ("messages", message), ("memory", held)):
        keys = [key(row) for row in rows(files[f"{table}.csv"])]
        assert keys == sorted(keys)
        if table != "messages":
            assert all(one < following for one, following in pairwise(keys)), "a key stands there twice"


@pytest.mark.every_case
@each_schedule
def test_under_unit_costs_every_number_is_an_integer(name: str, toy: Path) -> None:
    files = saved(trace_of(name, toy, real=False), toy / "out")
    for table in TABLES:
        assert b"." not in files[f"{table}.csv"]


@pytest.mark.every_case
@each_schedule
def test_with_real_costs_times_are_seconds_and_sizes_whole_bytes(name: str, toy: Path) -> None:
    files = saved(trace_of(name, toy, real=True), toy / "out")
    assert all("." in row["start"] and "." in row["end"] for row in rows(files["tasks.csv"]))
    for table in ("messages", "memory"):
        assert all(row["size"].isdigit() for row in rows(files[f"{table}.csv"]))


@pytest.mark.every_case
@each_schedule
@each_cost
def test_an_update_belongs_to_no_micro_batch_and_makes_a_version(name: str, real: bool, toy: Path) -> None:
    tasks = rows(saved(trace_of(name, toy, real), toy / "out")["tasks.csv"])
    updates = [row for row in tasks if row["kind"] == "U"]
    assert {int(row["step"]) for row in updates} == {0, 1, 2}
    for row in updates:
        assert (row["micro_batch"], row["stale"]) == ("", "0")
        assert int(row["version"]) == int(row["step"]) + 1
        assert row["start"] == row["end"]
    assert all(row["micro_batch"] and int(row["version"]) >= 0 for row in tasks if row["kind"] != "U")
    assert {row["kind"] for row in tasks} == {"U", "F", "B"}


def test_cells_are_empty_where_there_is_no_single_one(toy: Path) -> None:
    """An all-reduce has no root, a gradient sum no micro-batch; a boundary has both and its sender's stage."""
    messages = rows(saved(trace_of("mp-dp", toy, real=False), toy / "mp")["messages.csv"])
    together = [row for row in messages if row["op"] == "all_reduce"]
    assert together
    assert all((row["micro_batch"], row["src"]) == ("", "") for row in together)
    assert {row["dst"] for row in together} == {"0|3|6", "1|4|7", "2|5|8"}
    forth = [row for row in messages if row["content"] == "activation"]
    back = [row for row in messages if row["content"] == "activation_gradient"]
    for row in forth + back:
        assert int(row["src"]) == int(row["micro_batch"]) * 3 + int(row["stage"])
        assert int(row["dst"]) - int(row["src"]) == (1 if row in forth else -1)
    messages = rows(saved(trace_of("zero-dp", toy, real=False), toy / "zero")["messages.csv"])
    assert {row["op"] for row in messages} == {"broadcast", "reduce"}
    assert {row["src"] for row in messages} == {"0", "1", "2"}


@pytest.mark.every_case
@each_schedule
def test_destinations_are_integers_where_all_go_point_to_point(name: str, toy: Path) -> None:
    trace = trace_of(name, toy, real=False)
    single = bool((trace.messages["op"] == "p2p").all())
    assert single == (name not in ("multi-dp", "mp-dp", "zero-dp"))
    assert (trace.messages["dst"].dtype.kind == "i") == single
    if not single:
        assert {type(cell) for cell in trace.messages["dst"].tolist()} == {str}


def test_groups_are_sorted_by_their_members_whatever_their_numbers() -> None:
    """2|14|26 comes before 10|22|34, though not as text."""
    run = simulate("mp-dp", 12, steps=1)
    program, messages = run.program, run.program.messages
    single = messages.op == Op.P2P
    last = len(program.groups) - 1
    same = np.where(single, messages.stage, -1)
    other_way = np.where(single, messages.dst, last - messages.dst)
    program = replace(program, groups=program.groups[::-1], messages=replace(messages, stage=same, dst=other_way))
    start = np.zeros_like(run.start)
    columns = replace(run, program=program, start=start).messages
    together = [dst for op, dst in zip(columns["op"], columns["dst"], strict=True) if op == "all_reduce"]
    members = [[int(device) for device in dst.split("|")] for dst in together]
    assert len(members) == 12
    assert members == sorted(members)
    assert members[2][0] == 2


def test_what_starts_together_is_sorted_down_to_the_last_column() -> None:
    """Equal messages of unequal sizes: the smaller one first, whichever was assembled first."""
    run = simulate("multi-cdp", 2, steps=2)
    messages = run.program.messages
    count = len(messages)
    blank = np.zeros(count, dtype=np.int64)
    same = replace(messages, op=blank + Op.P2P, content=blank, stage=blank, micro_batch=blank, step=blank)
    same = replace(same, src=blank, dst=blank, size=np.arange(count)[::-1] // 2)
    start, end = np.zeros_like(run.start), np.zeros_like(run.end)
    end[len(run.program.tasks) :] = np.arange(count)[::-1]
    program = replace(run.program, messages=same)
    columns = replace(run, program=program, start=start, end=end).messages
    keys = list(zip(columns["size"].tolist(), columns["end"].tolist(), strict=True))
    assert count > 3
    assert keys == sorted(keys)


@pytest.mark.every_case
@each_schedule
@each_cost
def test_memory_has_one_row_for_each_change_and_ends_empty(name: str, real: bool, toy: Path) -> None:
    held: dict[tuple[str, str], list[int]] = {}
    for row in rows(saved(trace_of(name, toy, real), toy / "out")["memory.csv"]):
        held.setdefault((row["device"], row["category"]), [0]).append(int(row["size"]))
    assert {category for _, category in held} >= {"activations", "parameters", "gradients"}
    for sizes in held.values():
        assert all(one != following for one, following in pairwise(sizes))
        assert min(sizes) == sizes[-1] == 0


def test_the_summary_says_what_was_asked_and_what_came_out(toy: Path) -> None:
    trace = trace_of("mp-cdp", toy, real=True, steps=4, jitter="uniform:0.1", seed=7)
    summary = json.loads(saved(trace, toy / "out")["summary.json"])
    assert summary == trace.summary()
    assert summary["cdpsim"] == __version__
    assert list(summary["request"]) == [
        *("schedule", "n", "m", "steps", "rule", "prefetch", "slot_order", "collective", "jitter", "seed"),
        *("model", "cluster"),
    ]
    assert (summary["request"]["schedule"], summary["request"]["steps"], summary["request"]["seed"]) == ("mp-cdp", 4, 7)
    assert [row["device"] for row in summary["peak_memory"]] == list(range(summary["devices"]))
    assert [row["device"] for row in summary["bytes_sent"]] == list(range(summary["devices"]))
    assert summary["makespan"] == trace.tasks["end"].max()
    peak = trace.memory["size"][(trace.memory["device"] == 0) & (trace.memory["category"] == "activations")].max()
    assert summary["peak_memory"][0]["activations"] == peak


# Folders that are no trace


def instead(line: int, text: str) -> Callable[[Path], None]:
    """Replace one line of a file."""

    def change(file: Path) -> None:
        lines = file.read_text().splitlines()
        lines[line] = text
        file.write_text("\n".join(lines) + "\n")

    return change


def as_a_whole(content: str | bytes) -> Callable[[Path], None]:
    """Replace all of a file."""

    def change(file: Path) -> None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def as_folder(file: Path) -> None:
    """Put a folder where the file was."""
    file.unlink()
    file.mkdir()


AGAIN = "; write the trace again"
HEADER = HEADERS["tasks"]
BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    *((file, Path.unlink, "no such file or directory; check its spelling") for file in FILES[:-1]),
    (
        "summary.json",
        Path.unlink,
        "is missing, so the trace was not written to its end; write the trace again (--force)",
    ),
    ("tasks.csv", as_folder, "is a folder; give a file"),
    ("tasks.csv", as_a_whole(""), "is empty"),
    ("tasks.csv", as_a_whole(b"\0"), "is binary"),
    ("tasks.csv", as_a_whole("\n" + HEADER), f"its header is '' instead of '{HEADER}'{AGAIN}"),
    ("tasks.csv", instead(0, "kind,stage"), f"its header is 'kind,stage' instead of '{HEADER}'{AGAIN}"),
    ("memory.csv", instead(0, "x" * 5000), f"its header is '{'x' * 100}' instead of '{HEADERS['memory']}'{AGAIN}"),
    ("tasks.csv", instead(2, "F,0,0"), f"line 3 has 3 cells instead of 9{AGAIN}"),
    ("tasks.csv", instead(-1, ""), f"has 1 cells instead of 9{AGAIN}"),
    ("tasks.csv", instead(2, "F,0,0,0,0,0,1,0,0,"), f"line 3 has 10 cells instead of 9{AGAIN}"),
    ("tasks.csv", instead(2, "X,0,0,0,0,0,1,0,0"), f"line 3: kind is 'X'{AGAIN}"),
    ("tasks.csv", instead(2, ",0,0,0,0,0,1,0,0"), f"line 3: kind is ''{AGAIN}"),
    ("tasks.csv", instead(3, "F,0,0,0,x,0,1,0,0"), f"line 4: device is 'x'{AGAIN}"),
    ("tasks.csv", instead(3, "F,0,0,0,,0,1,0,0"), f"line 4: device is ''{AGAIN}"),
    ("tasks.csv", instead(3, "F,0,0,0,-1,0,1,0,0"), f"line 4: device is '-1'{AGAIN}"),
    ("tasks.csv", instead(3, "F,0,0,0, 1,0,1,0,0"), f"line 4: device is ' 1'{AGAIN}"),
    ("tasks.csv", instead(3, "F,0,0,0,1.5,0,1,0,0"), f"line 4: device is '1.5'{AGAIN}"),
    ("tasks.csv", instead(3, "F,0,0,0,1_0,0,1,0,0"), f"line 4: device is '1_0'{AGAIN}"),
    ("tasks.csv", instead(3, "F,0,0,0,٣,0,1,0,0"), f"line 4: device is '٣'{AGAIN}"),
    ("tasks.csv", instead(3, f"F,0,0,0,{'9' * 19},0,1,0,0"), f"line 4: device is '{'9' * 19}'{AGAIN}"),
    ("tasks.csv", instead(3, f"F,0,0,0,{'9' * 5000},0,1,0,0"), f"line 4: device is '{'9' * 40}'{AGAIN}"),
    ("tasks.csv", instead(1, "F,0,0,0,0,nan,1,0,0"), f"line 2: start is 'nan'{AGAIN}"),
    ("tasks.csv", instead(1, "F,0,0,0,0,-0.5,1,0,0"), f"line 2: start is '-0.5'{AGAIN}"),
    ("tasks.csv", instead(1, "F,0,0,0,0,0,inf,0,0"), f"line 2: end is 'inf'{AGAIN}"),
    ("tasks.csv", instead(1, "F,0,0,0,0,0,1e999,0,0"), f"line 2: end is '1e999'{AGAIN}"),
    ("tasks.csv", instead(1, 'F,"0",0,0,0,0,1,0,0'), f"line 2: stage is '\"0\"'{AGAIN}"),
    ("messages.csv", instead(1, "p2p,activation,0,0,0,0,0|,1,1,1,1"), f"line 2: dst is '0|'{AGAIN}"),
    ("messages.csv", instead(1, "p2p,activation,0,0,0,0,,1,1,1,1"), f"line 2: dst is ''{AGAIN}"),
    ("messages.csv", instead(1, "p2p,activation,0,0,0,0|1,1,1,1,1,1"), f"line 2: src is '0|1'{AGAIN}"),
    ("messages.csv", instead(1, "send,activation,0,0,0,0,1,1,1,1,1"), f"line 2: op is 'send'{AGAIN}"),
    ("messages.csv", instead(1, "p2p,P2P,0,0,0,0,1,1,1,1,1"), f"line 2: content is 'P2P'{AGAIN}"),
    ("messages.csv", instead(1, "p2p,activation,0,0,-2,0,1,1,1,1,1"), f"line 2: step is '-2'{AGAIN}"),
    ("memory.csv", instead(1, "0,cake,0,1"), f"line 2: category is 'cake'{AGAIN}"),
    ("memory.csv", instead(1, "0,activations,x\x1b[31m,1"), f"line 2: time is 'x\\x1b[31m'{AGAIN}"),
    ("summary.json", as_a_whole("{"), "not a summary: Input data was truncated" + AGAIN),
    ("summary.json", as_a_whole("[]"), "not a summary: Expected `object`, got `array`" + AGAIN),
    ("summary.json", as_a_whole("[" * 100_000), "not a summary: "),
    ("summary.json", as_a_whole('{"a": ' * 100_000), "not a summary: "),
    ("summary.json", as_a_whole('{"a": nan}'), "not a summary: JSON is malformed"),
]


@pytest.mark.parametrize(("file", "change", "problem"), BROKEN, ids=[f"{k}-{case[0]}" for k, case in enumerate(BROKEN)])
def test_a_broken_trace_is_refused_in_one_line(
    file: str, change: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    simulate("mp-cdp", 3).save(tmp_path / "out")
    change(tmp_path / "out" / file)
    with pytest.raises(RequestError) as refusal:
        load(tmp_path / "out")
    line = str(refusal.value)
    assert line.startswith(f"{tmp_path / 'out' / file}: ")
    assert problem in line
    assert line.isprintable()
    assert ";" in line or "?" in line, "no remedy"


@pytest.mark.parametrize("what", ["missing", "file", ""])
def test_what_is_no_folder_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(RequestError, match=r"tasks\.csv: (no such file or directory; check its|not a directory; )"):
        load(what)


def test_a_trace_may_be_larger_than_other_files(tmp_path: Path) -> None:
    """One collective among 2.5 million devices makes a line of 19 MB."""
    simulate("multi-dp", 2).save(tmp_path / "out")
    members = "|".join(map(str, range(2_500_000)))
    instead(1, f"all_reduce,gradient,0,,0,,{members},1,1,1,1")(tmp_path / "out/messages.csv")
    assert (tmp_path / "out/messages.csv").stat().st_size > 2**24
    assert load(tmp_path / "out").messages["dst"][0] == members


def test_a_trace_saved_with_other_line_ends_is_the_same(tmp_path: Path) -> None:
    """As an editor elsewhere may leave it."""
    trace = simulate("mp-cdp", 3)
    trace.save(tmp_path / "out")
    for table in TABLES:
        file = tmp_path / "out" / f"{table}.csv"
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert_same(trace, load(tmp_path / "out"))


def test_a_trace_without_messages_is_a_trace(tmp_path: Path) -> None:
    trace = simulate("single-dp", 1, steps=1)
    files = saved(trace, tmp_path / "out")
    assert files["messages.csv"] == HEADERS["messages"].encode() + b"\n"
    assert_same(trace, load(tmp_path / "out"))
    assert load(tmp_path / "out").messages["op"].tolist() == []


def test_a_trace_is_not_overwritten_unless_forced(tmp_path: Path) -> None:
    trace = simulate("mp-cdp", 3)
    files = saved(trace, tmp_path / "out")
    with pytest.raises(RequestError, match="already exists; --force overwrites"):
        simulate("mp-cdp", 2).save(tmp_path / "out")
    assert {file: (tmp_path / "out" / file).read_bytes() for file in FILES} == files
    simulate("mp-cdp", 2).save(str(tmp_path / "out"), force=True)
    assert load(tmp_path / "out").summary()["request"]["n"] == 2


def test_every_schedule_of_the_paper_is_tried() -> None:
    assert set(PAPER) <= set(SCHEDULES)


def test_shapes_of_tensors_come_back_as_they_were_saved(tmp_path: Path) -> None:
    stage = Stage(forward=1.0, backward=2.0, activation=1, parameters=14, tensors=((2, 3), (1,)))
    trace = simulate("dp", 1, model=Model(stages=(stage,)))
    trace.save(tmp_path / "a")
    assert_same(trace, load(tmp_path / "a"))
