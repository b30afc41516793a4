"""A new option is one row: all that knows options finds it there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.field_tables import PAGES

ROW = """
    lucky: Annotated[
        Lucky | None,
        Option(
            "WORD",
            "a word that gradients carry along",
            usual="no word",
            applies=lambda s: s.flushes,
        ),
    ]
"""
# A process of its own, in which the package's file of options has one more row: before --clip.
BEGINNING = """
import importlib.machinery, json, sys
from importlib.abc import MetaPathFinder

class OneRowMore(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        if not path.endswith(".py"):
            raise OSError("no cached code")
        text = super().get_data(path).decode()
        word = 'Lucky = Literal["seven", "nine"]\\n'
        text = text.replace("class ScheduleOptions", word + "class ScheduleOptions", 1)
        before, after = text.split("    clip: Annotated[", 1)
        return (before + ROW.lstrip("\\n") + "    clip: Annotated[" + after).encode()

    def path_stats(self, path):
        raise OSError("no cached code")

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "cdpsim.request.options":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        found.loader = OneRowMore(name, found.origin)
        return found

sys.meta_path.insert(0, Finder())
"""


def answers(tmp_path: Path, program: str) -> dict[str, Any]:
    """Return what a program says as JSON that runs with the new row."""
    text = f"ROW = {ROW!r}\n{BEGINNING}\nimport cdpsim\n{program}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_python_files_and_records_have_it(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('[run]\nschedule = "gpipe"\nn = 2\nlucky = "nine"\n')
    program = """
from inspect import signature
from cdpsim.errors import RequestError
def refusal(**options):
    try:
        cdpsim.simulate(n=2, **options)
    except (RequestError, TypeError) as error:
        return str(error)
kind = signature(cdpsim.simulate).parameters["lucky"]
request = cdpsim.Request("gpipe", 2, lucky="seven")
again = cdpsim.Request(**request)
plain = cdpsim.Request("gpipe", 2)
print(json.dumps({
    "signature": [kind.default, "seven" in str(kind.annotation)],
    "record": [request["lucky"], again["lucky"], again == request, "lucky" in plain],
    "last of the record": [*request][-1],
    "file": cdpsim.Request.load("one.toml")["lucky"],
    "wrong": refusal(schedule="gpipe", lucky="sevn"),
    "untaken": refusal(schedule="multi-cdp", lucky="seven"),
    "misspelt": refusal(schedule="gpipe", luky="seven"),
}))
"""
    found = answers(tmp_path, program)
    untaken, misspelt = found.pop("untaken"), found.pop("misspelt")
    assert found == {
        "signature": [None, True],
        "record": ["seven", "seven", True, False],
        "last of the record": "lucky",
        "file": "nine",
        "wrong": "lucky: unknown lucky 'sevn'; did you mean 'seven'?",
    }
    assert untaken.startswith(
        "lucky: multi-cdp does not take this option (it takes m, prefetch, compress); dp, gpipe, 1f1b,"
    )
    assert misspelt.endswith("did you mean 'lucky'?")


def test_commands_lists_and_pages_have_it(tmp_path: Path) -> None:
    program = f"""
import contextlib, io
from cdpsim.cli import main
def said(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, words)])
    return [code, out.getvalue(), err.getvalue()]
from cdpsim.studies.plan.wanted import PLAN_OPTIONS
from cdpsim.studies.sweep.questions import QUESTIONS
compared = cdpsim.compare("gpipe", "multi-cdp", n=2, lucky=["seven", "nine"], sort="given")
found = cdpsim.plan(devices=2, batch=4, schedules=["gpipe"], lucky=["seven", "nine"], top=9)
sys.path.insert(0, {str(PAGES.parent / "_ext")!r})
try:
    import command_options
    lines = [line for line in command_options.request_lines() if "lucky" in line]
except ImportError:  # without Sphinx
    lines = None
print(json.dumps({{
    "help": " ".join(said("simulate", "--help-all")[1].split()),
    "misspelt": said("simulate", "gpipe", "-n", 2, "--luky", "seven"),
    "code": said("simulate", "gpipe", "-n", 2, "--lucky", "seven", "-q")[0],
    "schedules": said("schedules", "--format", "csv")[1],
    "compare": [[row.schedule, row.asked] for row in compared.measured],
    "untaken": compared.untaken,
    "sweep": ["lucky" in QUESTIONS[name].options for name in ("compare", "breakeven", "pyramid", "plan")],
    "plan": [word for word in ("nine", "seven") if word in str([[row.command, row.equal] for row in found.rows])],
    "plan options": "lucky" in PLAN_OPTIONS,
    "page": lines,
}}))
"""
    found = answers(tmp_path, program)
    assert "--lucky WORD a word that gradients carry along (default: no word)" in found.pop("help")
    code, _, error = found.pop("misspelt")
    assert (code, "did you mean '--lucky'?" in error) == (2, True)
    taking = {line.split(",")[0] for line in found.pop("schedules").splitlines() if "lucky" in line}
    assert {"gpipe", "dp"} <= taking
    assert "multi-cdp" not in taking
    assert found.pop("page") in (None, ["| `lucky` | – | a word that gradients carry along; without it no word |"])
    assert found == {
        "code": 0,
        "compare": [["gpipe", {"lucky": "seven"}], ["gpipe", {"lucky": "nine"}], ["multi-cdp", {}]],
        "untaken": {"lucky": ["multi-cdp"]},
        "sweep": [True] * 4,
        "plan": ["nine", "seven"],
        "plan options": True,
    }


def test_a_plan_is_proved_with_it(tmp_path: Path) -> None:
    """One word leaves a twentieth of the bytes of gradients, another halves the times of tasks; bounds follow both."""
    program = """
from functools import cached_property
from msgspec.structs import replace
import numpy as np
from cdpsim import Cluster, Model, Request, Stage, evaluate, plan
from cdpsim.cluster import Devices, Link
from cdpsim.program import Content
from cdpsim.program.assembly.build import Builder
from cdpsim.runs import assembling

word, send, assemble = None, Builder.send, assembling._assemble_unexpanded
whole = Request.timed_model.func

def assemble_with_word(request, **options):
    global word
    word = request["lucky"] if "lucky" in request else None
    return assemble(request, **options)

def send_less(self, op, content, of, dst, size, **columns):
    less = word == "seven" and content is Content.GRADIENT
    return send(self, op, content, of, dst, np.asarray(size) // 20 if less else size, **columns)

def with_faster_tasks(request):
    model = whole(request)
    if "lucky" not in request or request["lucky"] != "nine":
        return model
    halved = [replace(each, forward=each.forward / 2, backward=each.backward / 2) for each in model.stages]
    return replace(model, stages=tuple(halved))

Request.timed_model = cached_property(with_faster_tasks)
Request.timed_model.__set_name__(Request, "timed_model")
Builder.send, assembling._assemble_unexpanded = send_less, assemble_with_word
paces = (3.0, 1.0, 2.0, 2.0)
stages = [Stage(forward=f, backward=2 * f, activation=2**20, boundary=2**16, parameters=2**24) for f in paces]
cluster = Cluster(devices=(Devices(),), link=Link(latency=1e-3, bandwidth=2.0**22))
found = plan(
    Model(stages=tuple(stages)), cluster, devices=4, batch=8, memory="1 TB", top=1,
    schedules=["dp", "1f1b", "gpipe", "zb-h1"], lucky=[None, "seven", "nine"],
)
search, every = found.search, {}
for number, candidate in enumerate(search.space.candidates):
    if candidate.refusal is None:
        one = evaluate(**candidate.options)
        every[number] = float(one.step), one.memory
beaten = lambda point: any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in every.values())
by_word = [
    min(time for number, (time, _) in every.items() if search.space.candidates[number].options.get("lucky") == each)
    for each in (None, "seven", "nine")
]
print(json.dumps({
    "proved": found.proved,
    "spared": sum(one.fate == "cannot be better" for one in search.space.candidates) > 10,
    "best": float(found.rows[0]["step"]) == min(every.values())[0],
    "front": {(float(one.measured.step), one.measured.memory) for one in search.space.candidates if one.measured}
    >= {point for point in every.values() if not beaten(point)},
    "too high": [
        number for number, (time, memory) in every.items()
        if (least := search.space.candidates[number].least).step > time * (1 + 1e-12) or least.memory > memory
    ],
    "words matter": by_word[1] < 0.9 * by_word[0] and by_word[2] < 0.9 * by_word[0],
}))
"""
    found = answers(tmp_path, program)
    assert found.pop("too high") == []
    assert all(found.values()), found
