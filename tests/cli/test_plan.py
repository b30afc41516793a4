"""The command `plan`: tables, files and exit codes."""

import csv
import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from cdpsim import Measured, Model, Stage, evaluate, plan
from tests.conftest import Command
from tests.helpers.command_line import content, refuse
from tests.helpers.every_row import every_row

SMALL = ("plan", "--devices", "4", "--batch", "8")


def test_rows_front_and_counts_are_printed(command: Command) -> None:
    """By hand: 1f1b's step is 3 (m + n - 1) = 33 slots of split backwards; zb-h1 has a third of its bubble, 27."""
    done = command(*SMALL, "--schedules", "1f1b,zb-h1", "--memory", "6")
    assert (done.code, done.err) == (0, "")
    status = plan(devices=4, batch=8, schedules="1f1b,zb-h1", memory=6).status
    assert status.startswith("proved: no synchronous candidate is better than row 1; not varied: ")
    assert (
        done.out
        == f"""\
4 devices, 8 micro-batches in a training step, at most 6 on a device
a backward takes two slots, because some of these schedules split it (--model unit-split)
2 candidates: 2 simulated
{status}

   schedule  n  m  step  micro-batches  memory  staleness
-  --------  -  -  ----  -------------  ------  ---------
1  zb-h1     4  8    27         0.2963       6          0
2  1f1b      4  8    33         0.2424       6          0

front: no other candidate is as good in step, memory, devices and staleness, and better in one
   schedule  n  m  step  micro-batches  memory  staleness
-  --------  -  -  ----  -------------  ------  ---------
1  zb-h1     4  8    27         0.2963       6          0

row 1: cdpsim compare zb-h1 -n 4 -m 8 --model unit-split
"""
    )


def test_lists_switches_and_objectives_are_searched(command: Command) -> None:
    words = ["plan", "--model", "gpt2", "--cluster", "a100-nodes", "--devices", "2", "--batch", "32", "-n", "1,2"]
    words += ["--schedules", "1f1b,dp", "--recompute", "none,layer", "--clip", "--objective", "memory"]
    written = json.loads(command(*words, "--top", "3", "--format", "json").out)
    sizes = [row["memory"] for row in written["rows"]]
    assert sizes == sorted(sizes)
    assert (written["objective"], len(sizes), written["proved"]) == ("memory", 3, True)
    every = {row["request"].get("clip") for row in written["front"]}
    assert every <= {None, True}
    assert written["searched"]["candidates"] > 16


def test_nothing_that_fits_is_the_answer_no(command: Command) -> None:
    done = command(*SMALL, "--schedules", "1f1b,gpipe", "--memory", "3")
    assert done.code == 1
    assert "proved: no candidate fits" in done.out
    assert done.err == (
        "cdpsim: no candidate fits into 3; least is needed by `cdpsim compare 1f1b -n 4 -m 8`: 6, 3 "
        "too much (activations 4, parameters 1, gradients 1)\n"
    )


def test_no_time_is_an_answer(command: Command, here: Path) -> None:
    done = command(*SMALL, "--seconds", "0", "-o", "plan.csv")
    assert (done.code, done.err) == (0, "")
    assert "stopped after 0 s: " in done.out
    assert "row 1: cdpsim compare " in done.out
    done = command(*SMALL, "--seconds", "0", "--memory", "1")
    assert done.code == 1
    assert done.err == "cdpsim: no candidate is known to fit; allow more --seconds or --memory\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--devices 1000000 --batch 8", "n: 1,000,000 stages and "),
        ("--devices 1000000 --batch 8 --model gpt2 --cluster a100-nodes", "batch: "),
        ("--devices 4096 --batch 1000000000", "batch: no candidate trains on 1,000,000,000 samples on 4,096 devices; "),
        ("--devices 4096 --batch 1000000000 -n 4096 --schedules 1f1b", "batch: 4,096 stages and 1,000,000,000 micro"),
        ("--devices 1000001 --batch 8", "devices: 1,000,001 are more than plans are made for; give at most 1,000,000"),
        ("--devices 64 --batch 64 --max-memory 10kB", "max-memory: more than 2 candidates do not fit"),
    ],
)
def test_a_space_that_is_too_large_is_refused_in_time(command: Command, here: Path, words: str, line: str) -> None:
    begun = process_time()
    refuse(command, here, f"plan {words} --seconds 2", line)
    assert process_time() - begun < 4


def test_ctrl_c_prints_what_is_known(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished table stays as it is, and no other file is written."""
    assert command(*SMALL, "-o", "P.csv").code == 0
    finished = content(here)
    calls: list[object] = []

    def interrupted(**options: Any) -> Measured:
        calls.append(options)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return evaluate(**options)

    monkeypatch.setattr("cdpsim.studies.plan.search.evaluate", interrupted)
    done = command(*SMALL)
    assert (done.code, done.err) == (130, "cdpsim: interrupted\n")
    assert "\ninterrupted: " in done.out
    assert "2 simulated" in done.out
    assert "row 1: cdpsim compare " in done.out
    for output in (("P.csv", "--force"), ("Q.json",), ("Q.svg",)):
        calls.clear()
        done = command(*SMALL, "-o", *output)
        said = f"cdpsim: {output[0]}: is not written, as the search was interrupted\ncdpsim: interrupted\n"
        assert (done.code, done.err) == (130, said)
        assert "\ninterrupted: " in done.out
        assert content(here) == finished


def test_selective_recomputation_is_tried_where_it_is_asked_for(command: Command, here: Path) -> None:
    """Fused attention keeps 4 bytes a head and token: 12 layers x 12 heads x 8 x 1,024 tokens x 4 B of 5.08 GB.

    Unfused attention of a heads keeps 5 a s^2 b of s b h (34 + 5 a s / h) bytes (Korthikanti et al. 2022): no note.
    """
    model = ("--model", "gpt2", "--cluster", "h100-node")
    words = ("plan", "--devices", 2, "--batch", 16, "--schedules", "dp", "--shard", 1, *model)
    assert command(*words, "-o", "plan.csv").err == ""
    rows = csv.DictReader((here / "plan.csv").read_text(encoding="utf-8").splitlines())
    assert {row["recompute"] for row in rows} == {"none", "layer"}
    share = 12 * 12 * 8 * 1024 * 4 / Model.load("gpt2").size("activation").sum()
    note = (
        f"cdpsim: --recompute selective: the core of attention is {100 * share:.2f} % of the activations of gpt2, "
        "so that its time is lost and no memory saved; layer saves more\n"
    )
    assert command(*words, "--recompute", "none,selective").err == note
    assert command("compare", "1f1b", "gpipe", "-n", 2, *model, "--recompute", "none,selective").err == note
    assert command("simulate", "1f1b", "-n", 2, *model, "--recompute", "selective").err == note
    a, s, b, h = 96, 2048, 1, 12288
    core = 5 * a * s * s * b
    stage = Stage(
        forward=1.0,
        backward=2.0,
        activation=34 * s * b * h + core,
        boundary=2 * s * b * h,
        attention_activation=core,
        attention_forward=0.1,
    )
    Model(stages=(stage, stage)).save(here / "unfused.toml")
    assert command("compare", "1f1b", "--model", "unfused.toml", "--recompute", "selective").err == ""


def test_files_have_all_candidates(command: Command, here: Path) -> None:
    for name in ("plan.csv", "plan.json", "plan.svg"):
        assert command(*SMALL, "-o", name).code == 0
    rows = list(csv.DictReader((here / "plan.csv").read_text(encoding="utf-8").splitlines()))
    written = json.loads((here / "plan.json").read_text(encoding="utf-8"))
    assert len(rows) == len(written["candidates"]) == written["searched"]["candidates"]
    assert [row["fate"] for row in rows] == [row["fate"] for row in written["candidates"]]
    assert all(row["why"] for row in rows if row["fate"] == "cannot be asked")
    assert all(row["step"] for row in rows if row["fate"] == "simulated")
    assert (here / "plan.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_rows_of_csv_say_whether_they_are_on_the_front(command: Command) -> None:
    rows = list(csv.DictReader(command(*SMALL, "--memory", "6", "--format", "csv").out.splitlines()))
    assert rows[0]["front"] == "true"
    assert {row["front"] for row in rows} == {"true", "false"}
    assert rows[0]["command"].startswith("cdpsim compare ")


@every_row(
    ("words", "refusal"),
    [
        (["--devices", "4"], "batch: is missing; give the samples of a training step"),
        ([*SMALL[1:], "--steps", "9"], None),
        ([*SMALL[1:], "--jitter", "normal:0.1"], "--jitter: unknown option; "),
        ([*SMALL[1:], "--objective", "fame"], "objective: "),
        ([*SMALL[1:], "--schedules", "1f1c"], "schedule: unknown schedule '1f1c'; did you mean '1f1b'?"),
        ([*SMALL[1:], "--top", "0"], "top: top=0 must be at least 1"),
        ([*SMALL[1:], "--width", "5"], "width: is of a picture; give its file with -o, or leave it out"),
        ([*SMALL[1:], "-o", "plan.txt"], "plan.txt: its form is unknown; "),
        ([*SMALL[1:], "-o", "plan.csv", "--dark"], "dark: is of "),
        ([*SMALL[1:], "-n", "4,"], "-n: has nothing between two commas in '4,'; give values"),
    ],
)
def test_what_a_plan_cannot_be_asked_is_refused(
    words: list[str], refusal: str | None, command: Command, here: Path
) -> None:
    before = content(here)
    done = command("plan", *words)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert done.out == ""
    assert refusal is None or done.err.startswith(f"cdpsim: error: {refusal}")
    assert content(here) == before


def test_a_file_that_exists_is_kept(command: Command, here: Path) -> None:
    (here / "plan.csv").write_text("mine")
    refuse(command, here, f"{' '.join(SMALL)} -o plan.csv", "plan.csv: already exists; --force overwrites")
    assert (here / "plan.csv").read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--recompute", "foo", "unknown recompute 'foo'"),
        ("--optimizer", "adamm", "did you mean 'adam"),
        ("--zero", "5", "ZeRO's stages are 0 to 3"),
        ("--rule", "foo", "rule"),
        ("--buckets", "foo", "'foo' is neither one of none, torch, megatron, deepspeed nor sizes"),
        ("--outer", "foo", "'foo' is no optimizer"),
        ("--prefetch", "foo", "prefetch=foo must be a whole number of at least 0"),
    ],
)
def test_values_that_nothing_has_are_refused(
    option: str, value: str, line: str, command: Command, tmp_path: Path
) -> None:
    """And not counted among the candidates that cannot be asked."""
    usual = "plan --devices 2 --batch 16 --model gpt2 --cluster a100-nodes"
    refuse(command, tmp_path, f"{usual} {option} {value}", line)
