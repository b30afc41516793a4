"""Files for Perfetto, read by Perfetto's own trace processor and compared with the trace's columns."""

import copy
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.draw.views import Views
from cdpsim.errors import RequestError
from cdpsim.export import chrome as chrome_module
from cdpsim.export.chrome import _sort_slices, chrome, nanoseconds
from cdpsim.program import EdgeKind
from cdpsim.runs import Run
from cdpsim.trace import Trace, load
from tests import conditions
from tests.conditions import need
from tests.helpers.strategies import fitting, requests
from tests.helpers.trace_processor import FAULTS, TraceProcessor, query, started

need(importlib.util.find_spec("perfetto"), "perfetto")

SLICES = """select p.name as process, t.name as thread, s.name as name, s.ts as ts, s.dur as dur, depth,
    s.id as id from slice s join thread_track tt on s.track_id = tt.id
    join thread t using (utid) join process p using (upid)"""
COUNTERS = """select p.name as process, t.name as name, c.ts as ts, c.value as value
    from counter c join process_counter_track t on c.track_id = t.id join process p using (upid)"""
SIZES: dict[str, Any] = {"activation": 10**9, "boundary": 10**7, "parameters": 10**8, "optimizer": 2 * 10**8}
FOUR = tuple(
    Stage(forward=f, backward=b, weight_backward=b / 3, **SIZES)
    for f, b in ((0.01, 0.02), (0.0123456789, 0.031), (0.005, 0.005), (0.007, 0.013))
)
UNEVEN = Model(stages=FOUR[:3])
SLOW = Cluster(devices=(Devices(),), link=Link(latency=1e-5, bandwidth=4e9))


@pytest.fixture(scope="module")
def processor() -> Iterator[TraceProcessor]:
    processor = started()
    yield processor
    processor.close()


def whole(trace: Trace, time: Any) -> int:
    """A time in nanoseconds; a slot is a microsecond."""
    return int(time) * 1000 if trace.in_slots else round(float(time) * 1e9)


def rows(columns: Any) -> list[dict[str, Any]]:
    names, columns = list(columns.keys()), [column.tolist() for column in columns.values()]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


STREAMS = {"gather": "gathers", "reduce": "reductions", "across": "across"}


def link_name(src: int, dst: str, op: str) -> str:
    """Where a message goes over."""
    if op == "p2p":
        return f"{src} → {dst}"
    members = list(map(int, dst.split("|")))
    if len(members) > 2 and members[-1] - members[0] == len(members) - 1:
        return f"devices {members[0]}–{members[-1]}"
    name = f"devices {', '.join(map(str, members))}"
    return name if len(name) <= 60 else f"{name[:48]}…"  # and then their number, which `without_lane` takes off


def expected_slices(trace: Trace) -> list[tuple[str, str, str, int, int]]:
    """Process, thread, name, time and duration of all tasks, then all messages."""
    result = []
    for task in rows(trace.tasks):
        start, end = whole(trace, task["start"]), whole(trace, task["end"])
        micro_batch = task["micro_batch"] if task["kind"] != "U" else ""
        name = f"{task['stage']}{task['kind']}{micro_batch}{'/' if task['stale'] else ''}"
        thread = "updates" if task["kind"] == "U" else "tasks"
        result.append((f"device {task['device']}", thread, name, start, end - start))
    for message in rows(trace.messages):
        start, end = whole(trace, message["start"]), whole(trace, message["end"])
        name = message["content"] if message["op"] == "p2p" else f"{message['op']} {message['content']}"
        i, j = message["micro_batch"], message["stage"]
        maker = {"activation": "F", "activation_gradient": "B"}.get(message["content"])
        name += f" {j}{maker}{i}" if maker else f" of stage {j}" if j >= 0 else " of all"
        link = link_name(message["src"], str(message["dst"]), message["op"])
        if stream := message.get("stream", ""):
            link = f"{STREAMS[stream]}, {link}"
        result.append(("links", link, name, start, end - start))
    return result


def without_lane(thread: str) -> str:
    """A thread's name without the number that it has where a device or link has several."""
    return re.sub(r" \(\d+\)$", "", thread)


def expected_arrows(trace: Trace) -> set[tuple[int, int]]:
    """From which slice to which: from what made it to a message, and from it to what needs it.

    Where that began before, from the message to the one that goes on with it. Between two tasks of one micro-batch.
    """
    if not isinstance(trace, Run):
        return set()
    trace = trace.whole
    made, used = Views(trace).message_tasks
    count = len(trace.tasks["start"])
    slices = expected_slices(trace)
    pairs = [(task, message + count) for message, task in zip(*made, strict=True)]
    pairs += [(message + count, task) for message, task in zip(*used, strict=True)]
    result = {(a, b) for a, b in pairs if slices[a][3] <= slices[b][3]}
    no_source, no_target = {b for a, b in pairs if (a, b) not in result}, {a for a, b in pairs if (a, b) not in result}
    node = {int(n): k + count for k, n in enumerate(trace.message_nodes)}
    task = {int(n): k for k, n in enumerate(trace.task_nodes) if trace.tasks["kind"][k] != "U"}
    edges = trace.program.edges
    for before, after, kind in zip(edges.before.tolist(), edges.after.tolist(), edges.kind.tolist(), strict=True):
        if kind == EdgeKind.DATA and before in node and after in node:
            a, b = node[before], node[after]
            if a in no_target or b in no_source:
                result.add((a, b))
        if kind == EdgeKind.DATA and before in task and after in task:
            result.add((task[before], task[after]))
    return result


def expected_counters(trace: Trace) -> dict[tuple[str, str], dict[int, int]]:
    """For each device and category what it holds from each time on; of two changes at one time the last."""
    unit = "stage-activations" if trace.in_slots else "bytes"
    result: dict[tuple[str, str], dict[int, int]] = {}
    for row in rows(trace.memory):
        curve = result.setdefault((f"device {row['device']}", f"{row['category']} {unit}"), {})
        curve[whole(trace, row["time"])] = row["size"]
    return result


def check(trace: Trace, processor: TraceProcessor, content: bytes | None = None) -> None:
    """Everything arrives, on its track and at its time, and nothing is amiss."""
    processor.load(b"".join(chrome(trace)) if content is None else content)
    assert processor.query(FAULTS) == []
    slices = processor.query(f"{SLICES} order by s.id")
    assert len(slices) == processor.query("select count() from slice")[0][0]
    expected = expected_slices(trace)
    assert Counter((p, without_lane(t), n, ts, d) for p, t, n, ts, d, *_ in slices) == Counter(expected)
    # One above another would be hidden; only updates are that, which take no time and no lane.
    assert {thread for _, thread, *_, depth, _ in slices if depth} <= {"updates"}
    at = {number: (p, without_lane(t), n, ts, d) for p, t, n, ts, d, _, number in slices}
    found = Counter((at[a], at[b]) for a, b in processor.query("select slice_out, slice_in from flow"))
    assert found == Counter((expected[a], expected[b]) for a, b in expected_arrows(trace))
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for process, name, time, value in processor.query(f"{COUNTERS} order by c.id"):
        assert time not in curves.setdefault((process, name), {})
        curves[process, name][time] = value
    assert curves == expected_counters(trace)


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_of_a_run_arrives(name: str, processor: TraceProcessor) -> None:
    for n, steps in ((1, 2), (4, 3)):
        check(simulate(**fitting(name, n), steps=steps), processor)


@pytest.mark.parametrize("name", SCHEDULES)
def test_real_costs_arrive_to_the_nanosecond(name: str, processor: TraceProcessor) -> None:
    wanted = fitting(name, 3)
    check(simulate(**wanted, steps=2, model=Model(stages=FOUR[: wanted["n"]]), cluster=SLOW), processor)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "multi-cdp", "mp-cdp"])
def test_arrows_lead_a_micro_batch_through_all_its_stages(name: str, processor: TraceProcessor) -> None:
    """From its first forward to its last backward, by way of all tasks of its step: F to F, F to B, B to B."""
    run = simulate(**fitting(name, 4), steps=2)
    processor.load(b"".join(chrome(run)))
    slices = {
        number: (name, step)
        for number, name, step in processor.query(
            "select s.id as id, s.name as name, a.int_value as step from slice s join args a using (arg_set_id) "
            "where a.key = 'args.step'"
        )
    }
    after: dict[int, list[int]] = {}
    for a, b in processor.query("select slice_out, slice_in from flow"):
        after.setdefault(a, []).append(b)
    stages = 1 + int(run.tasks["stage"].max())
    wanted = {f"{j}{kind}2" for j in range(stages) for kind in "FB"}
    (first,) = (number for number, (name, step) in slices.items() if name == "0F2" and step == 1)
    reached, waiting = {first}, [first]
    while waiting:
        for one in after.get(waiting.pop(), ()):
            if one not in reached and slices[one][1] == 1 and "U" not in slices[one][0]:
                reached.add(one)
                waiting.append(one)
    assert wanted <= {slices[one][0].rstrip("/") for one in reached}


def test_a_sum_that_comes_late_goes_on_in_the_next_one(processor: TraceProcessor) -> None:
    """The backward whose gradient is added to it began before, and no arrow leads back."""
    trace = simulate("multi-cdp", steps=2, model=UNEVEN, cluster=SLOW)
    check(trace, processor)
    arrows = expected_arrows(trace)
    assert any(a >= len(trace.tasks["start"]) <= b for a, b in arrows)


@given(request=requests())
@settings(max_examples=30)
def test_any_run_arrives(processor: TraceProcessor, request: dict[str, Any]) -> None:
    """If it takes less than 51 days: Perfetto reads microseconds as doubles, beyond 2**42 not to the nanosecond."""
    run = simulate(**request, ignore_memory=True)
    assume(run.in_slots or run.makespan < 2**42 / 1e6)
    check(run, processor)


@pytest.mark.parametrize("costs", ["unit", "real"])
def test_a_loaded_trace_arrives_without_its_arrows(costs: str, processor: TraceProcessor, tmp_path: Path) -> None:
    given = {"n": 3} if costs == "unit" else {"model": UNEVEN, "cluster": SLOW}
    for name in ("mp-cdp", "mp-dp", "zero-dp"):
        trace = simulate(name, steps=2, **given)
        trace.save(tmp_path / name)
        check(load(tmp_path / name), processor)


def test_changes_within_a_nanosecond_are_one(processor: TraceProcessor) -> None:
    """And what takes less than one is there, without a length, beside what begins then."""
    short = Stage(forward=2e-10, backward=3e-10, activation=5, boundary=1, parameters=7)
    check(simulate("multi-cdp", steps=2, model=Model(stages=(short,) * 3), cluster=SLOW), processor)


@pytest.mark.parametrize("times", [1, 80])
def test_what_is_longer_than_104_days_has_whole_microseconds(times: int, processor: TraceProcessor) -> None:
    """A reader of JSON that has floats could not tell nanoseconds apart, and slices would overlap."""
    forward, backward = times * 1234567.1234567, times * 2345678.7654321
    long = Stage(forward=forward, backward=backward, activation=5, boundary=1, parameters=7)
    trace = simulate("pp-cdp", steps=2, model=Model(stages=(long,) * 4), cluster=SLOW)
    assert trace.tasks["end"].max() * 1e9 > 2**53
    starts = nanoseconds(Views(trace), trace.tasks["start"])
    assert not (starts % 1000).any()
    assert np.abs(starts / 1e9 - trace.tasks["start"]).max() < 1e-6
    processor.load(b"".join(chrome(trace)))
    assert processor.query(FAULTS) == []
    found = processor.query("select ts, dur from slice where name glob '[0-9]*[FB]*'")
    ends = nanoseconds(Views(trace), trace.tasks["end"])
    expected = [
        (a, b - a) for a, b, k in zip(starts.tolist(), ends.tolist(), trace.tasks["kind"], strict=True) if k != "U"
    ]
    assert sorted(found) == sorted(expected)


def test_what_no_nanoseconds_can_hold_is_refused() -> None:
    forever = Stage(forward=1e9, backward=1e9, activation=5, boundary=1, parameters=7)
    trace = simulate("pp-cdp", steps=2, model=Model(stages=(forever,) * 4), cluster=SLOW)
    with pytest.raises(RequestError, match=r"^trace: is longer than 146 years, .*; give fewer --steps$"):
        chrome(trace)


def test_tracks_have_names_and_an_order() -> None:
    trace = simulate("single-cdp", 2, steps=1)
    shown = json.loads(b"".join(chrome(trace)))["traceEvents"]
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in shown if e["ph"] == "M"}
    threads = sorted((where for what, *where in named if what == "thread_name"), key=lambda where: where[1])
    assert [named["thread_name", *where]["name"] for where in threads] == ["tasks (1)", "tasks (2)", "updates"]
    assert [named["thread_sort_index", *where]["sort_index"] for where in threads] == [0, 1, 2]
    # A thread with its process's number would be its main thread.
    assert not {tid for _, tid in threads} & {pid for pid, _ in threads}

    trace = simulate("zero-dp", 12, steps=1)
    shown = json.loads(b"".join(chrome(trace)))["traceEvents"]
    names, places = (
        {e["pid"]: e["args"][key] for e in shown if e["name"] == f"process_{what}"}
        for what, key in (("name", "name"), ("sort_index", "sort_index"))
    )
    expected = [*(f"device {d}" for d in range(12)), "links"]
    assert [names[pid] for pid in sorted(places, key=places.__getitem__)] == expected


def test_links_come_in_their_order_and_then_groups() -> None:
    events = json.loads(b"".join(chrome(simulate("mp-dp", 3, steps=1))))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 9]
    expected = [f"{a} → {b}" for a in range(9) for b in (a - 1, a + 1) if b // 3 == a // 3 and b >= 0]
    assert names == [*expected, "devices 0, 3, 6", "devices 1, 4, 7", "devices 2, 5, 8"]


def test_hover_says_what_columns_say(processor: TraceProcessor) -> None:
    trace = simulate("mp-dp", 2, steps=2)
    processor.load(b"".join(chrome(trace)))
    key = "replace(replace(key, 'args.', ''), 'debug.', '')"
    said: dict[tuple[str, int, str], dict[str, Any]] = {}
    for name, ts, thread, what, text, number in processor.query(
        f"select p.name as name, p.ts as ts, p.process || p.thread as thread, {key} as what, string_value, int_value "
        f"from ({SLICES}) p join slice using (id) join args using (arg_set_id)"
    ):
        said.setdefault((name, ts, thread), {})[what] = text if text is not None else number
    for task, (process, thread, name, ts, _) in zip(rows(trace.tasks), expected_slices(trace), strict=False):
        about = said[name, ts, process + thread]
        expected = {k: task[k] for k in ("stage", "micro_batch", "step", "version", "stale") if task[k] != -1}
        assert {k: about.get(k) for k in expected} == expected
        assert ("micro_batch" in about) == (task["kind"] != "U")
    slices = expected_slices(trace)[len(trace.tasks["start"]) :]
    for message, (process, thread, name, ts, _) in zip(rows(trace.messages), slices, strict=True):
        about = said[name, ts, process + thread]
        expected = {k: message[k] for k in ("op", "content", "step", "size", "rounds", "stage")}
        together = message["op"] != "p2p"
        expected["dst"] = thread if together else int(message["dst"])
        assert {k: about.get(k) for k in expected} == expected
        assert about.get("src") == (None if message["src"] == -1 else message["src"])


def test_the_same_request_gives_the_same_bytes() -> None:
    first, second = (b"".join(chrome(simulate("zero-cdp", 4, steps=2))) for _ in range(2))
    assert first == second


def test_chunks_are_small_and_their_borders_show_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = simulate("multi-cdp", 4, steps=2)
    at_once = list(chrome(trace))
    monkeypatch.setattr(chrome_module, "_EVENTS_AT_ONCE", 7)
    chunks = list(chrome(trace))
    assert len(chunks) > 10 + len(at_once)
    assert b"".join(chunks) == b"".join(at_once)


HOSTILE = '</script><script>alert("1")</script>\n\x00\u2028$x^2$ \\ %s ' + "x" * 10_000


def test_hostile_names_are_data(processor: TraceProcessor, tmp_path: Path) -> None:
    """A model may be called almost anything, and a file that is loaded may say anything."""
    model = Model(stages=UNEVEN.stages, name='</script>"\\\\ $x^2$ %s')
    trace = simulate("multi-cdp", steps=1, model=model, cluster=SLOW)
    check(trace, processor)
    trace.save(tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    summary["request"]["model"]["name"] = HOSTILE
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    loaded = load(tmp_path / "run")
    content = b"".join(chrome(loaded))
    check(loaded, processor, content)
    assert b"</" not in content
    assert not any(byte < 32 and byte != 10 for byte in content)
    head = json.loads(content)["otherData"]
    assert head["request"]["model"]["name"] == HOSTILE
    assert len(head["title"]) < 200
    assert head["title"].startswith("multi-cdp, n = 3, cdp-v2, </script><script>alert")


def test_a_summary_that_says_nothing_is_no_hindrance(tmp_path: Path) -> None:
    simulate("pp-cdp", 2, steps=1).save(tmp_path / "run")
    for request in ("[1]", '{"model": {"name": 3}}', "null"):
        (tmp_path / "run/summary.json").write_text(f'{{"request": {request}}}')
        assert json.loads(b"".join(chrome(load(tmp_path / "run"))))["otherData"]["title"].startswith("trace")


def test_readers_of_pytorch_profiles_find_what_they_look_for() -> None:
    """Kineto's form: a schema, and the rank; every event has what all kinds of them need."""
    text = b"".join(chrome(simulate("multi-cdp", 3, steps=1))).decode()
    assert re.search(r'"rank":\s+(\d+)', text)  # this is how Holistic Trace Analysis looks for it, line by line
    content = json.loads(text)
    assert content["schemaVersion"] == 1
    assert content["displayTimeUnit"] == "ns"
    assert content["distributedInfo"] == {"backend": "cdpsim", "rank": 0, "world_size": 3}
    assert content["otherData"]["title"] == "multi-cdp, n = 3, cdp-v2"
    assert content["otherData"]["request"]["schedule"] == "multi-cdp"
    for event in content["traceEvents"]:
        assert {"ph", "pid", "name"} <= set(event)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or {"tid", "dur", "cat", "args"} <= set(event)
        assert event["ph"] not in "sf" or {"tid", "id", "cat"} <= set(event)


def test_the_check_finds_what_is_wrong(processor: TraceProcessor) -> None:
    """Slices that overlap, that end before they begin, and that are missing; an arrow without its beginning."""
    trace = simulate("pp-cdp", 2, steps=1)
    content = json.loads(b"".join(chrome(trace)))

    def first(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return next(event for event in events if event["ph"] == kind)

    faults: list[Callable[[list[dict[str, Any]]], Any]] = [
        lambda events: first(events, "X").update(dur=1.5),
        lambda events: first(events, "X").update(dur=-1),
        lambda events: first(events, "X").update(ts=0.001),
        lambda events: events.remove(first(events, "X")),
        lambda events: events.remove(first(events, "s")),
        lambda events: events.remove(first(events, "f")),
        lambda events: events.remove(first(events, "C")),
        lambda events: first(events, "C")["args"].update({"stage-activations": 5}),
    ]
    check(trace, processor, json.dumps(content, ensure_ascii=False).encode())
    for change in faults:
        faulty = copy.deepcopy(content)
        change(faulty["traceEvents"])
        with pytest.raises(AssertionError):
            check(trace, processor, json.dumps(faulty, ensure_ascii=False).encode())


def test_a_file_is_queried_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(b"".join(chrome(simulate("single-dp", 2, steps=1))))
    assert query(file, "select count() from slice where name = '0F1'") == [(1,)]


def test_a_trace_without_tasks_is_refused(tmp_path: Path) -> None:
    simulate("pp-cdp", 1, steps=1).save(tmp_path / "run")
    for table in ("tasks", "messages", "memory"):
        file = tmp_path / "run" / f"{table}.csv"
        file.write_text(file.read_text().splitlines()[0] + "\n")
    with pytest.raises(RequestError, match=r"^trace: has no tasks"):
        chrome(load(tmp_path / "run"))


def test_without_node_the_check_is_skipped_or_fails_where_all_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setitem(conditions.tools, "must be there", False)
    with pytest.raises(pytest.skip.Exception, match="needs node"):
        started()
    monkeypatch.setitem(conditions.tools, "must be there", True)
    with pytest.raises(pytest.fail.Exception, match="node is missing"):
        started()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=60))
def test_slices_that_start_together_come_by_the_arrows_that_lead_to_them(pairs: list[tuple[int, int]]) -> None:
    arrows = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    expected = [0] * 21
    for a, b in arrows:  # by their sources, so that these are done
        expected[b] = max(expected[b], expected[a] + 1)
    source, target = (np.array([arrow[k] for arrow in arrows], dtype=np.int64) for k in range(2))
    order = _sort_slices(np.zeros(21, dtype=np.int64), source, target)
    assert order.tolist() == sorted(range(21), key=expected.__getitem__)
