"""The HTML file, read as a browser reads it: its data equal the trace's, and no name escapes from its element."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, simulate, trace
from cdpsim.cluster import Devices, Link
from cdpsim.export import page as module
from cdpsim.export.page import page
from cdpsim.runs import Run
from cdpsim.trace import TABLES, Trace
from tests.helpers.hostile_names import HOSTILE_NAME
from tests.helpers.made_traces import changed, empty, some_rows
from tests.helpers.strategies import fitting, requests

SIZES: dict[str, Any] = {"activation": 10**9, "boundary": 10**7, "parameters": 10**8}
FOUR = tuple(Stage(forward=0.01 + 0.003 * k, backward=0.02, weight_backward=0.01, **SIZES) for k in range(4))
TOY = Model(name="toy", stages=FOUR[:3])
BOX = Cluster(name="box", devices=(Devices(),), link=Link(latency=5e-6, bandwidth=1e9))


class Parts(HTMLParser):
    """The elements of a page: (tag, attributes, text), in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            self.elements[-1][2].append(data)

    def text(self, tag: str, **attributes: str) -> str:
        """Return the text of the one element with that tag and these attributes."""
        found = [e for e in self.elements if e[0] == tag and attributes.items() <= e[1].items()]
        assert len(found) == 1, (tag, attributes, len(found))
        return "".join(found[0][2])


class Read(NamedTuple):
    """The content of a page."""

    facts: dict[str, Any]
    columns: dict[str, np.ndarray]
    rows: list[list[int]]  # the bars of each row
    start: list[Any]
    end: list[Any]


def parts_of(*runs: Trace) -> Parts:
    return Parts(b"".join(page(*runs)).decode())


def read(*runs: Trace) -> Read:
    """Unpack a page with nothing of what packed it."""
    parts = parts_of(*runs)
    facts = json.loads(parts.text("script", id="facts"))
    raw = zlib.decompress(b64decode(parts.text("script", id="columns"), validate=True))
    columns, place = {}, 0
    for name, kind, length in facts["columns"]:
        columns[name] = np.frombuffer(
            raw, "<" + {"f": "f8"}.get(kind[0], kind[0] + str(int(re.sub(r"\D", "", kind)) // 8)), length, place
        )
        place += -(-columns[name].nbytes // 8) * 8
    assert place == len(raw)
    bounds = columns["row_first"].tolist()
    rows = [list(range(*pair)) for pair in pairwise(bounds)]
    start, end, at = [], [], 0
    for k, (gap, length) in enumerate(zip(columns["gap"].tolist(), columns["length"].tolist(), strict=True)):
        at = (0 if k in bounds else at) + gap
        start.append(columns["times"][at].item())
        at += length
        end.append(columns["times"][at].item())
    return Read(facts, columns, rows, start, end)


def near(given: list[Any], expected: list[Any], whole: float) -> bool:
    """Whether times are the same, but for what rounding does to seconds."""
    return len(given) == len(expected) and bool(np.all(np.abs(np.array(given) - np.array(expected)) <= 1e-11 * whole))


def said_tasks(said: Read) -> list[tuple[Any, ...]]:
    """Rows as in tasks.csv without their times, which stand behind them."""
    c, owner = said.columns, said.columns["row_owner"].tolist()
    device = {k: owner[row] for row, bars in enumerate(said.rows[: said.facts["deviceRows"]]) for k in bars}
    names = ("stage", "micro_batch", "step", "version", "stale")
    rows = zip(*(c[name].tolist() for name in names), strict=False)
    return [
        (said.facts["kinds"][c["kind"][k]], *row, device[k], said.start[k], said.end[k]) for k, row in enumerate(rows)
    ]


def true_tasks(run: Trace) -> list[tuple[Any, ...]]:
    names = ("kind", "stage", "micro_batch", "step", "version", "stale", "device", "start", "end")
    return list(zip(*(run.tasks[name].tolist() for name in names), strict=True))


def said_messages(said: Read) -> list[tuple[Any, ...]]:
    c, facts, first = said.columns, said.facts, len(said.columns["version"])
    result = []
    for row, bars in enumerate(said.rows[facts["deviceRows"] :], start=facts["deviceRows"]):
        link = c["row_owner"][row]
        op, src, dst = facts["ops"][c["link_op"][link]], int(c["link_src"][link]), int(c["link_dst"][link])
        members = str(dst) if op == "p2p" else "|".join(map(str, facts["groups"][dst]))
        for k in bars:
            content = facts["kinds"][c["kind"][k]].replace(" ", "_")
            numbers = (int(c[name][k]) for name in ("stage", "micro_batch", "step"))
            size, rounds = c["sizes"][c["size"][k - first]].item(), int(c["rounds"][k - first])
            result.append((op, content, *numbers, src, members, size, rounds, said.start[k], said.end[k]))
    return result


def true_messages(run: Trace) -> list[tuple[Any, ...]]:
    names = ("op", "content", "stage", "micro_batch", "step", "src", "dst", "size", "rounds", "start", "end")
    columns = [run.messages[name].tolist() for name in names]
    columns[6] = list(map(str, columns[6]))
    return list(zip(*columns, strict=True))


def same_rows(given: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], whole: float) -> None:
    given, expected = sorted(given), sorted(expected)
    assert [row[:-2] for row in given] == [row[:-2] for row in expected]
    for side in (-2, -1):
        assert near([row[side] for row in given], [row[side] for row in expected], whole)


@settings(max_examples=30)
@given(requests())
def test_a_page_says_what_the_trace_says(request: dict[str, Any]) -> None:
    run = simulate(**request)
    said, whole = read(run), float(run.tasks["end"].max())
    same_rows(said_tasks(said), true_tasks(run), whole)
    same_rows(said_messages(said), true_messages(run), whole)
    for bars in said.rows:
        assert all(said.end[a] <= said.start[b] for a, b in pairwise(bars))
    check_memory(run, said)
    check_waits(run, said)


def check_memory(run: Trace, said: Read) -> None:
    """Each device's curves, and their sum, at every time at which one changes."""
    c, categories, devices = said.columns, said.facts["categories"], said.facts["devices"]
    first = c["held_first"].tolist()
    held: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
    for curve, (low, high) in enumerate(pairwise(first)):
        places = np.cumsum(c["held_time"][low:high], dtype=np.int64)
        sizes = c["held_sizes"][c["held_size"][low:high]].tolist()
        held[curve // len(categories), categories[curve % len(categories)]] = c["times"][places].tolist(), sizes
    table = run.memory
    whole = float(run.tasks["end"].max())
    for category in categories:
        total: dict[float, float] = {}
        for device in range(devices):
            mine = (table["device"] == device) & (table["category"] == category)
            times, sizes = table["time"][mine].tolist(), table["size"][mine].tolist()
            assert near(held[device, category][0], times, whole)
            assert held[device, category][1] == sizes
            for time, change in zip(held[device, category][0], np.diff([0, *sizes]).tolist(), strict=True):
                total[time] = total.get(time, 0) + change
        assert held[devices, category][0] == sorted(total)
        assert held[devices, category][1] == np.cumsum([total[time] for time in sorted(total)]).tolist()


def check_waits(run: Trace, said: Read) -> None:
    """Check that a bar's cause has ended when it starts, and that a task's cause ended last of all it waited for."""
    assert isinstance(run, Run)
    run = run.whole
    whole, waits = float(run.tasks["end"].max()), said.columns["waits"].tolist()
    for k, away in enumerate(waits):
        assert said.end[k + away] <= said.start[k] + 1e-11 * whole or not away
    latest: dict[int, float] = {}
    for before, after in zip(*(nodes.tolist() for nodes in run.program.waits()), strict=True):
        latest[after] = max(latest.get(after, 0), float(run.end[before]))
    names = ("kind", "stage", "micro_batch", "step", "version", "device")
    tasks = zip(*(run.tasks[name].tolist() for name in names), strict=True)
    node = defaultdict(list)  # an estimate and the update that replaces it have one name
    of_tasks = zip(tasks, run.task_nodes.tolist(), run.tasks["start"].tolist(), strict=True)
    for task, number, _ in sorted(of_tasks, key=itemgetter(2)):
        node[task].append(number)
    if not len(run.program.parts):
        for k, (kind, stage, micro_batch, step, version, _, device, _, _) in enumerate(said_tasks(said)):
            ended = [said.end[k + waits[k]]] if waits[k] else [0]
            assert near(ended, [latest.get(node[kind, stage, micro_batch, step, version, device].pop(0), 0)], whole)


def test_what_a_bar_waited_for_is_what_the_program_says() -> None:
    """Under unit costs a backward in a pipeline waits for the gradient, which waits for the next stage's backward."""
    said = read(simulate("pp-cdp", 2))
    names = {}
    for k, kind in enumerate(said.columns["kind"].tolist()):
        names[said.facts["kinds"][kind], *(int(said.columns[c][k]) for c in ("step", "micro_batch", "stage"))] = k
    waits = said.columns["waits"].tolist()
    backward = names["B", 0, 0, 0]
    gradient = names["activation gradient", 0, 0, 1]
    assert backward + waits[backward] == gradient
    assert gradient + waits[gradient] == names["B", 0, 0, 1]


def test_idle_time_has_its_reasons() -> None:
    """Two stages and one micro-batch: forwards of 1 s, backwards of 2 s, messages of 1 s.

    Device 1 waits 1 s for the forward and 1 s for its output; device 0 waits 4 s from its forward on until the gradient
    is sent, and 1 s for the message.
    """
    stage = Stage(forward=1, backward=2, activation=1, boundary=10**9, parameters=0)
    link = Link(latency=0, bandwidth=1e9)
    run = simulate(
        "1f1b", m=1, steps=1, model=Model(stages=(stage,) * 2), cluster=Cluster(devices=(Devices(),), link=link)
    )
    said = read(run)
    c, spans = said.columns, []
    for device, (low, high) in enumerate(pairwise(c["idle_first"].tolist())):
        at = 0
        for k in range(low, high):
            begin = at + int(c["idle_gap"][k])
            at = begin + int(c["idle_length"][k])
            spans.append((device, *c["times"][[begin, at]].tolist(), said.facts["reasons"][c["idle_reason"][k]]))
    assert spans == [(0, 1, 5, "dependency"), (0, 5, 6, "message"), (1, 0, 1, "dependency"), (1, 1, 2, "message")]


def test_two_runs_stand_one_behind_the_other() -> None:
    first, second = simulate("mp-dp", 2, steps=2), simulate("1f1b", 3, m=4, steps=1)
    said = read(first, second)
    devices = 1 + int(first.tasks["device"].max())
    assert [run["devices"] for run in said.facts["runs"]] == [devices, 3]
    assert [run["name"] for run in said.facts["runs"]] == ["mp-dp, n = 2", "1f1b, n = 3, m = 4"]
    assert said.facts["title"] == "mp-dp, n = 2, dp and 1f1b, n = 3, m = 4, dp"
    moved = [(*row[:6], row[6] + devices, *row[7:]) for row in true_tasks(second)]
    same_rows(said_tasks(said), true_tasks(first) + moved, 100)

    def shift(row: tuple[Any, ...]) -> tuple[Any, ...]:
        members = "|".join(str(int(one) + devices) for one in row[6].split("|"))
        return (*row[:5], row[5] + devices if row[5] >= 0 else -1, members, *row[7:])

    same_rows(said_messages(said), true_messages(first) + [shift(row) for row in true_messages(second)], 100)
    alone, categories = [read(first), read(second)], len(said.facts["categories"])
    waiting = [np.count_nonzero(each.columns["waits"]) for each in (said, *alone)]
    assert waiting[0] == sum(waiting[1:]) > 0

    def held(page: Read, curve: int) -> list[Any]:
        low, high = page.columns["held_first"][curve * categories : (curve + 1) * categories + 1][[0, -1]]
        return list(page.columns["held_sizes"][page.columns["held_size"][low:high]].tolist())

    for curve, (each, its) in enumerate([(alone[0], k) for k in range(devices)] + [(alone[1], k) for k in range(3)]):
        assert held(said, curve) == held(each, its)
    assert [held(said, devices + 3), held(said, devices + 4)] == [held(alone[0], devices), held(alone[1], 3)]


def test_runs_that_share_no_clock_are_refused() -> None:
    slots, seconds = simulate("multi-dp", 3), simulate("multi-dp", model=TOY, cluster=BOX)
    with pytest.raises(RequestError, match=r"^page: one run is in slots, the other in seconds; give both a model"):
        page(slots, seconds)
    with pytest.raises(RequestError, match=r"^page: has room for 2 runs, not for 3; give two$"):
        page(slots, slots, slots)


def test_same_run_same_bytes() -> None:
    """With every hash seed."""
    program = (
        "import sys, cdpsim; from cdpsim.export.page import page; "
        "sys.stdout.buffer.writelines(page(cdpsim.simulate('zero-dp', 3)))"
    )
    run = [sys.executable, "-c", program]
    seeds = (os.environ | {"PYTHONHASHSEED": seed} for seed in "12")
    first, second = (subprocess.run(run, capture_output=True, check=True, env=seed).stdout for seed in seeds)
    assert first == second == b"".join(page(simulate("zero-dp", 3)))


def test_a_micro_batch_keeps_its_lane() -> None:
    """On one device, whose micro-batches are always in work once they have begun."""
    said = read(simulate("single-cdp", 4))
    lanes = [{int(said.columns["micro_batch"][k]) for k in bars} for bars in said.rows]
    assert lanes == [{-1}, {0}, {1}, {2}, {3}]


def test_a_summary_that_somebody_else_wrote() -> None:
    summary: dict[str, Any] = {"request": ["what"], "makespan": "long", "period": None, "bubble": float("inf")}
    summary |= {"steady_peak_memory": [1, {"total": "much"}]}
    said = read(changed(simulate("multi-dp", 2), summary))
    assert (said.facts["title"], said.facts["runs"][0]["summary"]) == ("trace", {})


def test_a_run_that_does_not_reach_steady_state_says_so() -> None:
    """Of PipeDream, 8 stages: in steady state the first one has 8 activations, 8 versions and a gradient."""
    few, many = (read(simulate("pipedream", 8, steps=steps)).facts["runs"][0]["summary"] for steps in (5, 40))
    assert few["held_in_steady_state"] == 17 and "held_in_steady_state" not in many


def test_a_device_of_an_absurd_number_is_refused() -> None:
    run = simulate("multi-dp", 2)
    run.memory["device"][-1] = 2**30
    with pytest.raises(RequestError, match="devices are more than the 4,000,000"):
        page(run)


def test_only_its_own_script_and_style_may_run() -> None:
    text = b"".join(page(simulate("zero-dp", 3))).decode()
    parts = Parts(text)
    policy = next(e[1]["content"] for e in parts.elements if e[1].get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))

    def hashed(tag: str) -> str:
        found = re.search(rf"<{tag}(?: type=\"module\")?>(.*?)</{tag}>", text, re.DOTALL)
        assert found is not None
        return f"'sha256-{b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "script-src": hashed("script"),
        "style-src": hashed("style"),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    loads = {"src", "href", "action", "style", "srcset", "data"}
    assert not [e for e in parts.elements if loads & set(e[1]) or any(name.startswith("on") for name in e[1])]
    assert "innerHTML" not in text


def test_hostile_names_stay_text() -> None:
    run = simulate("pp-cdp", model=msgspec.structs.replace(TOY, name=HOSTILE_NAME), cluster=BOX)
    text = b"".join(page(run)).decode()
    tame = b"".join(page(simulate("pp-cdp", model=TOY, cluster=BOX))).decode()
    parts = Parts(text)
    assert [e[0] for e in parts.elements] == [e[0] for e in Parts(tame).elements]
    title = json.loads(parts.text("script", id="facts"))["title"]
    assert title == parts.text("title") == parts.text("h1").strip()
    assert "</script><script>alert(1)</script><!--" in title
    assert title.isprintable()
    assert len(title) < 200


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loaded_trace_gives_the_same_page_without_who_waits_for_whom(name: str, tmp_path: Path) -> None:
    wanted = fitting(name, 3)
    run = simulate(**wanted, model=Model(name="toy", stages=FOUR[: wanted["n"]]), cluster=BOX, steps=2)
    run.save(tmp_path / "traces")
    before, after = read(run), read(trace.load(tmp_path / "traces"))
    assert not len(after.columns["waits"])
    assert before.facts | {"columns": 0} == after.facts | {"columns": 0}
    assert said_tasks(before) == said_tasks(after)
    assert said_messages(before) == said_messages(after)


def test_every_device_has_a_lane() -> None:
    """Also one that only holds something."""
    run = simulate("multi-dp", 2)
    held = {name: np.append(column, column[-1:]) for name, column in run.memory.items()}
    held["device"][-1] = 4
    said = read(changed(run, memory=held))
    assert said.facts["devices"] == 5
    lanes = zip(said.columns["row_owner"].tolist(), said.columns["row_lane"].tolist(), strict=True)
    assert {owner for owner, lane in list(lanes)[: said.facts["deviceRows"]] if lane == 1} == set(range(5))


def test_updates_have_no_lane_of_work() -> None:
    said = read(simulate("multi-cdp", 3))
    kinds = said.columns["kind"]
    for row, bars in enumerate(said.rows[: said.facts["deviceRows"]]):
        assert {bool(kinds[k] == 3) for k in bars} <= {said.columns["row_lane"][row] == 0}


def test_one_task() -> None:
    """A trace file with one row left."""
    run = simulate("single-dp", 1, steps=1)
    kept = {name: some_rows(getattr(run, name), slice(name == "tasks")) for name in TABLES}
    said = read(changed(run, **kept))
    assert (said.start, said.end) == ([0], [1])
    assert len(said.columns["held_time"]) == 0


def test_nothing_and_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate("multi-cdp", 2)
    monkeypatch.setattr(module, "MOST_PAGE_BARS", 10)
    with pytest.raises(
        RequestError, match="tasks and messages are more than the 10 that it can hold; take fewer steps"
    ):
        page(run)
    with pytest.raises(RequestError, match="has no tasks"):
        page(empty())
