"""The command line serves a request whole, or refuses it in one line with exit 2 and leaves nothing behind."""

import csv
import errno
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
import tqdm

from cdpsim import SCHEDULES, RequestError, __version__, cli, simulate
from cdpsim.cli import console, parser
from cdpsim.errors import one_line
from cdpsim.files.notes import progress
from cdpsim.invariants import INVARIANTS
from cdpsim.request.sharing import accepts, options_beyond_usual
from cdpsim.schedules import TABLE_1
from tests.conftest import TOY_CLUSTER, TOY_MODEL, Command, Outcome
from tests.helpers.command_line import FILES, assert_refused, content, refuse
from tests.helpers.every_row import every_row
from tests.helpers.strategies import fitting

TABLE1 = importlib.import_module("cdpsim.studies.table1")


# Numbers


BAD_NUMBERS = {
    "0": "n=0 must be at least 1",
    "-1": "n=-1 must be at least 1",
    "-0": "n=-0 must be at least 1",
    "2.0": "n=2.0 must be a whole number",
    "1e3": "n=1e3 must be a whole number",
    "inf": "n=inf must be a whole number",
    "nan": "n=nan must be a whole number",
    "": "n= must be a whole number",
    " 3": "n= 3 must be a whole number",
    "+3": "n=+3 must be a whole number",
    "1_000": "n=1_000 must be a whole number",
    "0x10": "n=0x10 must be a whole number",
    "\uff13": "n=\uff13 must be a whole number",
    "²": "n=² must be a whole number",
    "True": "n=True must be a whole number",
    "None": "n=None must be a whole number",
    "3\n4": "n=3\\n4 must be a whole number",
    str(10**6): "would fit",
    str(10**12): "would fit",
    "9" * 18: "would fit",
    str(10**18): "astronomically large",
    str(10**400): "astronomically large",
    "-" + "9" * 400: "astronomically large",
}


@pytest.mark.parametrize("number", BAD_NUMBERS)
@pytest.mark.parametrize("request_", ["table1", "simulate mp-cdp -o out", "simulate single-dp -o out"])
def test_what_is_no_number_of_stages_is_refused(number: str, request_: str, command: Command, here: Path) -> None:
    outcome = command(*request_.split(), f"-n={number}")
    assert_refused(outcome, "n: ", BAD_NUMBERS[number])
    assert len(outcome.err) < 300
    assert not (here / "out").exists()


OTHER_NUMBERS = {
    "simulate mp-cdp -n 3 -o out --steps 0": "steps=0 must be at least 1",
    "simulate mp-cdp -n 3 -o out --steps 1.5": "steps=1.5 must be a whole number",
    "simulate mp-cdp -n 3 -o out --steps 1000000000000": "would fit",
    "simulate mp-cdp -n 3 -o out --prefetch -1": "prefetch=-1 must be at least 0",
    "simulate mp-cdp -n 3 -o out --prefetch x": "prefetch=x must be a whole number",
    "simulate mp-cdp -n 3 -o out --seed -1": "seed=-1 must be at least 0",
    "simulate mp-cdp -n 3 -o out -m 0": "m=0 must be at least 1",
    "simulate mp-cdp -n 3 -o out --chunks 0": "chunks=0 must be at least 1",
    "table1 -n 3 --steps 2": "steps=2 must be at least 3",
    "table1 -n 3 --steps x": "steps=x must be a whole number",
    "table1 -n 1 --steps 1000000000000": "would fit",
}


@pytest.mark.parametrize("line", OTHER_NUMBERS)
def test_other_numbers_have_their_limits_too(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, OTHER_NUMBERS[line])


# Words


BAD_WORDS = {
    "tabel1 -n 3": ["unknown command 'tabel1'; did you mean 'table1'?"],
    "TABLE1 -n 3": ["unknown command"],
    "x": ["unknown command 'x'; known are schedules, models, clusters"],
    "xyzzy -n 3": ["unknown command 'xyzzy'; known are schedules, models", "and 11 more; see cdpsim --help"],
    "simulatr": ["unknown command 'simulatr'; did you mean 'simulate'?"],
    "-- x": ["COMMAND: invalid choice"],
    "--verzion": ["--verzion: unknown option; did you mean '--version'? see cdpsim --help-all"],
    "table1 -n 3 --xyzzy": ["--xyzzy: unknown option; see cdpsim table1 --help-all"],
    "simulate llama -n 3 -o out": ["unknown schedule 'llama'; known are single-dp", "more"],
    "models llama3-7": ["unknown model 'llama3-7'; did you mean 'llama3-70b'"],
    "table1 -n 3 -q -v": ["-v/--verbose: not allowed with argument -q/--quiet"],
    "table1": ["-n: is missing", "cdpsim table1 --help"],
    "table1 -n": ["-n: expected one argument"],
    "table1 -n 3 4": ["'4': is one argument too many"],
    "table1 -n 3 --stpes 4": ["--stpes: unknown option; did you mean '--steps'?", "cdpsim table1 --help"],
    "table1 -n 3 --stpes=4": ["--stpes: unknown option; did you mean '--steps'?"],
    "table1 -n 3 --step 4": ["--step: unknown option; did you mean '--steps'?"],
    "table1 -n 3 -N 4": ["-N: unknown option; did you mean '-n'?"],
    "simulate mp-cdp -N 3 -n 3 -o out": ["-N: unknown option; did you mean '-n'?"],
    "table1 -n 3 --shared-parameters=1": ["--shared-parameters: ignored explicit argument '1'"],
    "table1 -n 3 --format txt": ["unknown format 'txt'; did you mean 'text'?"],
    "table1 -n 3 --format yaml": ["unknown format 'yaml'; known are text, json, csv, latex"],
    "table1 -n 3 --collective rings": ["unknown collective 'rings'; did you mean 'ring'?"],
    "table1 -n 3 --engine slow": ["unknown engine 'slow'"],
    "table1 -n 3 --rule dp": ["--rule: unknown option"],
    "schedules --format txt": ["unknown format 'txt'"],
    "schedules all": ["'all': is one argument too many"],
    "simulate -n 3 -o out": ["NAME: is missing"],
    "simulate mp-cdp -n 3 -o out --format json": ["format: is of the summary that is printed without -o"],
    "simulate mp-cdp -n 3 --format csv": ["'csv' is for tables only; give text, json"],
    "simulate mp-cdp -o out": ["n: is missing; give the number of stages, or a model file that says it"],
    "simulate mp-cdpp -n 3 -o out": ["unknown schedule 'mp-cdpp'; did you mean 'mp-cdp'?"],
    "simulate MP-CPD -n 3 -o out": ["unknown schedule 'MP-CPD'"],
    "simulate xyz -n 3 -o out": ["unknown schedule 'xyz'; known are single-dp, single-cdp"],
    "simulate mp-cdp -n 3 -o out --engine simpi": ["unknown engine 'simpi'; did you mean 'simpy'?"],
    "simulate mp-cdp -n 3 -o out --collective x": ["unknown collective 'x'; known are recursive-doubling, ring, tree"],
    "simulate mp-cdp -n 3 -o out --rule cdp-v3": ["unknown rule 'cdp-v3'; did you mean 'cdp-v"],
    "simulate mp-cdp -n 3 -o out --rule xyz": ["unknown rule 'xyz'", "a CSV file of 0 and 1"],
    "simulate single-cdp -n 3 -o out --slot-order forward": [
        "unknown slot-order 'forward'; did you mean 'forward-first'?"
    ],
    "simulate mp-cdp -n 3 -o out --model tyo": ["unknown model 'tyo'"],
    "simulate mp-cdp -n 3 -o out --cluster bxo": ["unknown cluster 'bxo'"],
}


@pytest.mark.parametrize("line", BAD_WORDS)
def test_a_word_that_means_nothing_is_refused_with_the_one_that_was_meant(
    line: str, command: Command, here: Path
) -> None:
    refuse(command, here, line, *BAD_WORDS[line])


def test_a_mistake_that_names_no_argument_is_about_all_of_them() -> None:
    """As argparse words it where options exclude each other."""
    with pytest.raises(RequestError, match=r"^arguments: one of -a -b is required; see x --help$"):
        parser.Parser(prog="x").error("one of -a -b is required")


@pytest.mark.parametrize(
    ("options", "schedules"),
    [
        ("-m 2", [s.name for s in SCHEDULES.values() if not accepts(s, "m")]),
        ("--chunks 3", [s.name for s in SCHEDULES.values() if not accepts(s, "chunks")]),
        ("--replicas 2", [s.name for s in SCHEDULES.values() if not accepts(s, "replicas")]),
        ("--reduce last", [s.name for s in SCHEDULES.values() if not accepts(s, "reduce")]),
        ("--prefetch 1", [s.name for s in SCHEDULES.values() if not accepts(s, "prefetch")]),
        ("--slot-order backward-first", [s.name for s in SCHEDULES.values() if not accepts(s, "slot_order")]),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    options: str, schedules: list[str], command: Command, here: Path
) -> None:
    assert schedules
    for name in schedules:
        subject = options.split()[0].lstrip("-")
        line = f"simulate {name} -n 3 -o out {options}"
        refuse(command, here, line, f"{subject}: {name} does not take this option")


@pytest.mark.parametrize("name", SCHEDULES)
def test_options_at_their_defaults_are_always_fine(name: str, command: Command, here: Path) -> None:
    asked = fitting(name, 3)
    n, chunks = asked["n"], SCHEDULES[name].order.chunks
    m = asked.get("m", SCHEDULES[name].micro_batches(n))
    short = f"simulate {name} -n {n} -o a" + (f" -m {m}" if accepts(SCHEDULES[name], "m") else "")
    assert command(*short.split()) == (0, "", "")
    steps = n + 1 if name == "pipedream" else 3  # whose oldest reading is n - 1 steps old
    line = f"simulate {name} -n {n} -m {m} --chunks {chunks} --replicas 1 --prefetch 0 --seed 0 --steps {steps} -o b"
    assert command(*line.split(), "--model", "unit", "--cluster", "unit") == (0, "", "")
    assert content(here / "a") == content(here / "b")


# Rules


BAD_RULES = {
    "missing.csv": (None, "no such file or directory"),
    "folder.csv": ("", "is a folder"),
    "empty.csv": (b"", "is empty"),
    "binary.csv": (b"1,0\0\n", "is binary"),
    "small.csv": (b"0,0\n0,1\n", "the rule has 2 rows of 2, but 3 micro-batches and 3 stages need 3 rows of 3"),
    "ragged.csv": (b"0,0,0\n0,0\n0,0,1\n", "row 1 has 2 columns, row 0 has 3"),
    "words.csv": (b"0,0,0\n0,yes,1\n0,0,0\n", "row 1, column 1 is 'yes'; write 1 for fresh"),
    "fractions.csv": (b"0,0,0\n0,0,0.5\n0,0,0\n", "row 1, column 2 is '0.5'"),
    "twos.csv": (b"0,0,0\n0,0,0\n2,0,0\n", "row 2, column 0 is '2'"),
    "early.csv": (b"0,0,1\n1,0,0\n1,1,1\n", "not causal with cyclic timing: (i=1, j=0) would read"),
}


@every_row("name", BAD_RULES)
def test_a_broken_rule_file_is_refused(name: str, command: Command, here: Path) -> None:
    given, problem = BAD_RULES[name]
    if isinstance(given, bytes):
        (here / name).write_bytes(given)
    elif given is not None:
        (here / name).mkdir()
    refuse(command, here, f"simulate multi-cdp -n 3 -o out --rule {name}", problem)


def test_a_rule_file_says_what_a_named_rule_says(command: Command, here: Path) -> None:
    (here / "v2.csv").write_text("0,0,1\n0,1,1\n1,1,1\n")
    assert command("simulate", "multi-cdp", "-n", 3, "-o", "named").code == 0
    assert command("simulate", "multi-cdp", "-n", 3, "-o", "filed", "--rule", "v2.csv").code == 0
    named, filed = content(here / "named"), content(here / "filed")
    assert [name for name in FILES if named[name] != filed[name]] == ["summary.json"]
    assert json.loads(filed["summary.json"] or b"")["request"]["rule"] == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


RULES_AND_TIMINGS = {
    "multi-cdp --rule dp": "rule: 'dp' is not causal with cyclic timing: (i=0, j=0) would read theta_t",
    "pp-cdp --rule dp": "(i=0, j=0)",
    "single-dp --rule cdp-v1": "rule: 'cdp-v1' does not go with the simultaneous timing of single-dp",
    "zero-dp --rule cdp-v2": "rule: 'cdp-v2' does not go with the simultaneous timing of zero-dp",
}


@pytest.mark.parametrize("request_", RULES_AND_TIMINGS)
def test_a_rule_that_does_not_go_with_the_timing_is_refused(request_: str, command: Command, here: Path) -> None:
    refuse(command, here, f"simulate {request_} -n 3 -o out", RULES_AND_TIMINGS[request_])


# Model and cluster files


STAGE = '[[stages]]\nforward = "1 s"\nbackward = "2 s"\n'
BAD_MODELS: dict[str, tuple[str | bytes, str]] = {
    "empty.toml": ("", "is empty"),
    "binary.toml": ("\0\1\2", "is binary"),
    "latin.toml": (b"name = '\xe9'\n", "is not UTF-8"),
    "broken.toml": ("[[stages", "not TOML"),
    "broken.json": ("{", "not JSON"),
    "list.json": ("[]", "expected `object`"),
    "none.toml": ("stages = []", "$.stages"),
    "nothing.toml": ("name = 'x'", "$.stages: are missing; give [[stages]], or the shape of [layers]"),
    "deep.toml": ("stages = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    "deep.json": ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "dotted.toml": ("a" + ".a" * 5000 + " = 1", "nested too deeply"),
    "misspelt.toml": (STAGE + 'activations = "1 GB"\n', "unknown field 'activations'; did you mean 'activation'?"),
    "short.toml": ('[[stages]]\nforward = "1 s"\n', "missing required field `backward`"),
    "nan.toml": (STAGE.replace('"1 s"', "nan"), "$.stages[0].forward"),
    "inf.toml": (STAGE.replace('"1 s"', "inf"), "$.stages[0].forward"),
    "nan.json": ('{"stages": [{"forward": NaN, "backward": 1}]}', "$.stages[0].forward"),
    "negative.toml": (STAGE.replace("1 s", "-1 s"), "$.stages[0].forward"),
    "zero.toml": (STAGE.replace("1 s", "0 s"), "$.stages[0].forward"),
    "absurd.toml": (STAGE.replace('"1 s"', "1e300"), "$.stages[0].forward"),
    "digits.json": ('{"stages": [{"forward": 1, "backward": 1, "activation": 1%s}]}' % ("0" * 4000), "activation"),
    "bytes.toml": (STAGE + "activation = -1\n", "$.stages[0].activation"),
    "unit.toml": (STAGE.replace("1 s", "1 parsec"), "$.stages[0].forward"),
    "true.toml": (STAGE.replace('"1 s"', "true"), "$.stages[0].forward"),
    "repeat.toml": (STAGE + "repeat = 0\n", "$.stages[0].repeat"),
    "many.toml": (STAGE + "repeat = 1000000000000\n", "$.stages[0].repeat"),
    "wide.toml": (STAGE + "repeat = 200000\n", "would fit"),
    "work.toml": (STAGE.replace("1 s", "1 TFLOP"), "give --cluster with a speed"),
    "model.yaml": (STAGE, "end its name in .toml or .json"),
}


@every_row("name", BAD_MODELS)
def test_a_broken_model_file_is_refused(name: str, command: Command, here: Path) -> None:
    given, problem = BAD_MODELS[name]
    (here / name).write_bytes(given if isinstance(given, bytes) else given.encode())
    refuse(command, here, f"simulate multi-cdp -o out --model {name}", problem)


BAD_CLUSTERS = {
    "empty.toml": (" \n", "is empty"),
    "binary.json": ("\0", "is binary"),
    "misspelt.toml": ("[link]\nlatencey = 1\n", "unknown field 'latencey'; did you mean 'latency'?"),
    "nan.toml": ("[link]\nlatency = nan\n", "$.link.latency"),
    "negative.toml": ('[link]\nbandwidth = "-1 GB/s"\n', "$.link.bandwidth"),
    "none.toml": ("[link]\nbandwidth = 0\n", "$.link.bandwidth"),
    "speed.toml": ("[devices]\nspeed = inf\n", "$.devices"),
    "bits.toml": ('[link]\nbandwidth = "1 Gb/s"\n', "$.link.bandwidth"),
    "few.toml": ("name = 'few'\n[devices]\ncount = 2\n", "cluster 'few': has 2 devices, but multi-cdp needs 3"),
    "counts.toml": ("[devices]\ncount = 0\n", "$.devices"),
    "deep.json": ("[" * 100_000, "nested too deeply"),
}


@every_row("name", BAD_CLUSTERS)
def test_a_broken_cluster_file_is_refused(name: str, command: Command, here: Path) -> None:
    given, problem = BAD_CLUSTERS[name]
    (here / name).write_text(given)
    refuse(command, here, f"simulate multi-cdp -n 3 -o out --cluster {name}", problem)


@pytest.mark.parametrize("option", ["--model", "--cluster"])
def test_a_file_that_is_not_there_or_a_folder_is_refused(option: str, command: Command, here: Path) -> None:
    (here / "folder.toml").mkdir()
    line = f"simulate multi-cdp -n 3 -o out {option} "
    refuse(command, here, f"{line}missing.toml", "missing.toml: no such file or directory; check its spelling")
    refuse(command, here, f"{line}folder.toml", "folder.toml: is a folder; give a file")
    refuse(command, here, f"{line}missing/x.toml", "missing/x.toml: no such file or directory")
    refuse(command, here, f"{line}toy.toml/x.toml", "toy.toml/x.toml: not a directory")


def test_a_model_says_how_many_stages_there_are(command: Command, here: Path) -> None:
    refuse(command, here, "simulate multi-cdp -n 4 -o out --model toy.toml", "n=4, but the model has 3 stages")
    assert command("simulate", "multi-cdp", "-o", "a", "--model", "toy.toml").code == 0
    assert command("simulate", "multi-cdp", "-n", 3, "-o", "b", "--model", "toy.toml").code == 0
    assert content(here / "a") == content(here / "b")


def test_a_device_that_overflows_is_named_and_the_run_can_be_had_all_the_same(command: Command, here: Path) -> None:
    (here / "small.toml").write_text(TOY_CLUSTER.replace("80 GB", "2 GB"))
    line = "simulate multi-cdp -o out --model toy.toml --cluster small.toml"
    refuse(command, here, line, "memory: device 0 has 2,000,000,000 bytes", "at its peak", "--ignore-memory")
    assert command(*line.split(), "--ignore-memory") == (0, "", "")
    peak = max(row["total"] for row in json.loads((here / "out/summary.json").read_text())["peak_memory"])
    assert peak > 2e9


# Output


def test_a_trace_is_four_files_and_nothing_is_printed(command: Command, here: Path) -> None:
    assert command("simulate", "mp-cdp", "-n", 3, "-o", "out") == (0, "", "")
    assert sorted(content(here / "out")) == FILES


def test_nothing_is_overwritten_without_force(command: Command, here: Path) -> None:
    line = "simulate mp-cdp -n 3 -o out"
    (here / "out").mkdir()
    (here / "out/mine.txt").write_text("mine")
    (here / "out/memory.csv").write_text("precious")
    refuse(command, here, line, "out/memory.csv: already exists; --force overwrites")
    assert command(*line.split(), "--force") == (0, "", "")
    assert sorted(content(here / "out")) == sorted([*FILES, "mine.txt"])
    assert (here / "out/memory.csv").read_text().startswith("device,category,time,size\n")
    refuse(command, here, line, "already exists; --force overwrites")


BAD_OUTPUTS = {
    "toy.toml": "toy.toml: is a file; give a folder",
    "toy.toml --force": "toy.toml: is a file; give a folder",
    "missing/out": "there is no folder 'missing'; create it first",
    "toy.toml/out": "toy.toml",
    "taken --force": "taken/tasks.csv: is a folder; choose another name",
    f"{'x' * 300}": "file name too long; choose a shorter name",
}


@pytest.mark.parametrize("output", BAD_OUTPUTS)
def test_an_output_that_cannot_be_is_refused(output: str, command: Command, here: Path) -> None:
    (here / "taken/tasks.csv").mkdir(parents=True)
    refuse(command, here, f"simulate mp-cdp -n 3 -o {output}", BAD_OUTPUTS[output])


@pytest.mark.parametrize("output", ["", "a\0b"])
def test_an_output_without_a_name_is_refused(output: str, command: Command, here: Path) -> None:
    assert_refused(command("simulate", "mp-cdp", "-n", 3, "-o", output), "cannot name a file; give a path")


def test_an_output_is_refused_before_any_work(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdpsim.cli.arguments.simulate", lambda *_, **__: pytest.fail("worked for nothing"))
    refuse(command, here, "simulate mp-cdp -n 3 -o missing/out", "there is no folder")


def test_a_folder_that_cannot_be_written_is_refused(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    refuse(command, here, "simulate mp-cdp -n 3 -o out", "out: permission denied; choose another path")


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_that_fills_up_leaves_nothing_behind(
    exists: bool, command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if exists:
        (here / "out").mkdir()
    monkeypatch.setattr(os, "fsync", full)
    refuse(command, here, "simulate mp-cdp -n 3 -o out", "out: no space left on device; free some space")


# Hostile names


HOSTILE = ["a\nb", "a\rb", "\x1b[31mred\x1b[0m", "\u2028", "\u202egnp", "x" * 10_000, "\udcff", "%s%d{0}", "'\"\\"]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_stay_one_line(name: str, command: Command, here: Path) -> None:
    requests = [
        [name],
        [f"--{name}"],
        ["table1", "-n", name],
        ["table1", "-n", "3", "--format", name],
        ["table1", "-n", "3", f"--{name}"],
        ["table1", "-n", "3", name],
        ["simulate", name, "-n", "3", "-o", "out"],
        ["simulate", "mp-cdp", "-n", "3", "-o", f"{name}/x/y"],
        ["simulate", "mp-cdp", "-n", "3", "-o", "out", "--rule", name],
        ["simulate", "mp-cdp", "-n", "3", "-o", "out", "--rule", f"{name}.csv"],
        ["simulate", "mp-cdp", "-n", "3", "-o", "out", "--model", f"{name}.toml"],
        ["simulate", "mp-cdp", "-n", "3", "-o", "out", "--cluster", name],
        ["simulate", "mp-cdp", "-n", "3", "-o", "out", "--engine", name],
        ["simulate", "single-cdp", "-n", "3", "-o", "out", "--slot-order", name],
        ["simulate", "mp-cdp", "-n", "3", "-o", "out", "--collective", name],
    ]
    before = content(here)
    for request in requests:
        outcome = command(*request)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith("cdpsim: error: ")
        assert outcome.err.endswith("\n")
        assert outcome.err[:-1].isprintable()
        assert len(outcome.err) < 1100
    assert content(here) == before


@pytest.mark.parametrize("name", HOSTILE[:4], ids=range(4))
def test_hostile_fields_stay_one_line(name: str, command: Command, here: Path) -> None:
    (here / "bad.json").write_text(json.dumps({name: 1, "stages": [{"forward": name, "backward": name}]}))
    (here / "bad.csv").write_text(json.dumps(name))
    refuse(command, here, "simulate mp-cdp -o out --model bad.json", "bad.json")
    refuse(command, here, "simulate mp-cdp -n 3 -o out --cluster bad.json", "bad.json")
    refuse(command, here, "simulate mp-cdp -n 3 -o out --rule bad.csv", "bad.csv")


NAMES = [name for name in HOSTILE if "\udcff" not in name and len(name) < 250]
NAMES += ["=cmd|' calc'!A0", "+x", "-x", "@x", "<script>alert(1)", "a|b`c`[d](e)", "\x9b31m", "\x7f"]


@pytest.mark.parametrize("form", ["text", "csv", "json", "latex"])
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_hostile_names_of_files_are_shown_in_one_line(name: str, form: str, command: Command, here: Path) -> None:
    """A file name in a table reaches no terminal as a control character, and no spreadsheet as a formula."""
    assert command("timeline", "1f1b", "-n", 2, "-o", "x.csv").code == 0
    file = f"{name}.csv"
    Path("x.csv").rename(file)
    calm = command("compare", "1f1b", "-n", 2, "-m", 2, "--format", form).out
    for line in (["compare", f"./{file}"], ["compare", "--", file]):
        outcome = command(*line[:1], "--format", form, *line[1:])
        assert (outcome.code, outcome.err) == (0, ""), outcome
        assert all(shown.isprintable() for shown in outcome.out.split("\n"))
        assert outcome.out.count("\n") == calm.count("\n")
        if form == "json":
            assert json.loads(outcome.out)[0]["schedule"] == line[-1]
        if form == "csv":
            cell = list(csv.reader(io.StringIO(outcome.out)))[1][0]
            assert cell[0] not in "=+-@"
            assert cell == "'" * (line[-1][0] in "=+-@") + one_line(line[-1])


# Answers that are no


@pytest.fixture
def disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of mp-cdp that needs one round too many."""
    measure = TABLE1.simulated_cells

    def off_by_one(trace: Any, shared_parameters: bool) -> Any:
        cells = measure(trace, shared_parameters)
        return cells | {"rounds": cells["rounds"] + (trace.request["schedule"] == "mp-cdp")}

    monkeypatch.setattr(TABLE1, "simulated_cells", off_by_one)


@pytest.mark.usefixtures("disagreement")
def test_a_row_that_disagrees_is_shown_and_exits_with_1(command: Command) -> None:
    code, out, err = command("table1", "-n", 3)
    assert (code, err) == (1, "cdpsim: exact and simulated disagree: mp-cdp\n")
    assert [line.split()[0] for line in out.splitlines() if line.endswith("NO")] == ["mp-cdp"]
    code, out, _ = command("table1", "-n", 3, "--format", "json")
    assert code == 1
    assert [row["schedule"] for row in json.loads(out)["rows"] if not row["agree"]] == ["mp-cdp"]


# Interruptions, and failures of the machine


def raising(error: BaseException) -> Any:
    """A function that fails."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def test_an_interruption_exits_with_130(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdpsim.cli.arguments.simulate", raising(KeyboardInterrupt()))
    assert command("simulate", "mp-cdp", "-n", 3, "-o", "out") == (130, "", "cdpsim: interrupted\n")


def test_an_interruption_while_writing_leaves_nothing_behind(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(here)
    monkeypatch.setattr(os, "fsync", raising(KeyboardInterrupt()))
    assert command("simulate", "mp-cdp", "-n", 3, "-o", "out") == (130, "", "cdpsim: interrupted\n")
    assert content(here) == before


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (MemoryError(), "memory: there is not enough of it; take fewer stages or steps"),
        (OSError(errno.EMFILE, "Too many open files"), "system: Too many open files; mend that, try again"),
        (OSError(errno.EIO, "Input/output error", "a\nb"), "a\\nb: Input/output error"),
        (OSError("odd"), "system: odd; mend that"),
    ],
)
def test_a_failure_of_the_machine_is_one_line(
    error: Exception, problem: str, command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdpsim.cli.arguments.simulate", raising(error))
    refuse(command, here, "simulate mp-cdp -n 3 -o out", problem)


INTERRUPTED = """
import signal, sys
from cdpsim.request.sharing import accepts, options_beyond_usual
from cdpsim import cli

def simulate(*_, **__):
    print("ready", flush=True)
    while True:
        signal.pause()

# A shell's background jobs ignore the first of them, and those of nohup the second.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.modules["cdpsim.cli.arguments"].simulate = simulate
sys.exit(cli.main(["simulate", "mp-cdp", "-n", "3", "-o", sys.argv[1]]))
"""


ENDINGS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "terminated"}


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_exits_with_128_and_its_number(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (128 + number, "", f"cdpsim: {ENDINGS[number]}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_is_told_in_one_line(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, with the handlers that a shell gives its command."""

    def serve(_: object) -> int:
        signal.raise_signal(number)
        return 0

    before = _handlers()
    for each in ENDINGS:
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    try:
        assert console.exit_code_of(serve, []) == 128 + number
    finally:
        for each, handler in zip(ENDINGS, before, strict=True):
            signal.signal(each, handler)  # type: ignore[arg-type]
    assert capsys.readouterr().err == f"cdpsim: {ENDINGS[number]}\n"


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in ENDINGS]


def _handlers_while_serving() -> list[object]:
    found: list[object] = []

    def serve(_: object) -> int:
        found.extend(_handlers())
        return 0

    assert console.exit_code_of(serve, []) == 0
    return found


def test_signals_are_as_before_when_a_request_has_been_served() -> None:
    before, during = _handlers(), _handlers_while_serving()
    assert _handlers() == before
    assert during[0] == before[0]
    assert signal.SIG_DFL not in during[1:]


def test_handlers_of_a_program_around_it_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, and that of `nohup`, which ignores SIGHUP; and no thread beside the main one may set any."""
    before = _handlers()
    own: list[Any] = [lambda *_: None, signal.SIG_IGN]
    for number, handler in zip((signal.SIGTERM, signal.SIGHUP), own, strict=True):
        signal.signal(number, handler)
    try:
        assert _handlers_while_serving()[1:] == own
    finally:
        for number, handler in zip(ENDINGS, before, strict=True):
            signal.signal(number, handler)  # type: ignore[arg-type]
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(console.exit_code_of(lambda _: 0, [])))
    thread.start()
    thread.join()
    assert codes == [0]


# The streams


def run(*arguments: str, stdout: int | IO[str] = subprocess.PIPE, **environment: str) -> Outcome:
    """Call `python -m cdpsim` as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "cdpsim", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        check=False,
    )
    return Outcome(done.returncode, (done.stdout or b"").decode(), done.stderr.decode())


@pytest.mark.slow
def test_the_module_is_the_command() -> None:
    served = run("table1", "-n", "2", "--format", "json")
    assert (served.code, served.err) == (0, "")
    assert len(json.loads(served.out)["rows"]) == 9
    assert_refused(run("table1", "-n", "0"), "n=0 must be at least 1")
    assert_refused(run("simulate", "mp-cdp", "-n", "3", "-o", "/dev/null"), "/dev/null: is a file; give a folder")


def test_the_module_passes_its_exit_code_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for request, code in (("schedules", 0), ("nonsense", 2)):
        monkeypatch.setattr(sys, "argv", ["cdpsim", request])
        monkeypatch.delitem(sys.modules, "cdpsim.__main__", raising=False)
        with pytest.raises(SystemExit) as left:
            runpy.run_module("cdpsim", run_name="__main__")
        assert left.value.code == code


def test_the_command_is_installed_under_its_name() -> None:
    """`cdpsim` and `python -m cdpsim` are one function."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.scripts]\ncdpsim = "cdpsim.cli:main"' in project


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_encoding_of_the_terminal() -> None:
    plain = run("table1", "-n", "2", PYTHONIOENCODING="utf-8")
    assert "Ψ" in plain.out
    assert run("table1", "-n", "2", PYTHONIOENCODING="ascii") == plain
    assert run("table1", "--help", PYTHONIOENCODING="ascii").code == 0


@pytest.mark.parametrize("request_", ["table1 -n 2", "schedules", "--help", "--version", "simulate --help"])
def test_a_full_device_is_refused(request_: str) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 # a device, not a path of ours
        outcome = run(*request_.split(), stdout=full)
    assert_refused(outcome, "standard output: No space left on device; redirect it")


def test_a_full_device_is_refused_and_silenced(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself would complain again as it exits."""
    with open("/dev/full", "w") as full:  # noqa: PTH123 # a device, not a path of ours
        monkeypatch.setattr(sys, "stdout", full)
        assert_refused(command("schedules"), "standard output: No space left on device; redirect it")
        print("goes nowhere", file=full, flush=True)


@pytest.mark.parametrize("request_", ["table1 -n 2", "schedules --format json", "--help"])
def test_a_closed_pipe_is_no_failure(request_: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(*request_.split(), stdout=writer) == (0, "", "")
    finally:
        os.close(writer)


def test_head_may_stop_reading() -> None:
    line = f"'{sys.executable}' -m cdpsim table1 -n 3 --format json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.parametrize("request_", ["table1 -n 2", "schedules", "--help", "--version"])
def test_a_closed_output_is_refused(request_: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert_refused(command(*request_.split()), "standard output: is closed; open it, or redirect it into a file")


def test_a_command_without_data_needs_no_output(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert command("simulate", "mp-cdp", "-n", 3, "-o", "out").code == 0


def test_without_stderr_the_exit_code_still_tells(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert command("table1", "-n", 0) == (2, "", "")
    assert command("table1", "-n", 2).code == 0


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    """A stream into a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:  # noqa: PTH123 # a descriptor
        yield stream


@pytest.mark.usefixtures("disagreement")
def test_a_broken_stdout_is_silenced_and_the_answer_kept(
    broken: io.TextIOWrapper, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", broken)
    assert command("table1", "-n", 2) == (1, "", "cdpsim: exact and simulated disagree: mp-cdp\n")
    print("goes nowhere", file=broken, flush=True)


def test_a_broken_stderr_is_silenced(
    broken: io.TextIOWrapper, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", broken)
    assert command("table1", "-n", 0).code == 2
    print("goes nowhere", file=broken, flush=True)


def test_an_output_that_takes_only_text_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["--version"]) == 0
    assert stream.getvalue() == f"cdpsim {__version__}\n"


def test_what_was_printed_before_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("first")
        assert cli.main(["--version"]) == 0
        print("last")
    assert (tmp_path / "out").read_text() == f"first\ncdpsim {__version__}\nlast\n"


def test_the_arguments_of_the_process_are_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr() == (f"cdpsim {__version__}\n", "")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [1, 2, 3]
    assert progress(items, "about") is items
    terminal, bars = Terminal(), []

    def bar(iterable: list[int], **options: Any) -> list[int]:
        bars.append((iterable, options))
        return iterable

    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(tqdm, "tqdm", bar)
    assert list(progress(items, "about")) == items
    assert bars == [(items, {"desc": "about", "file": terminal, "delay": 2, "leave": False})]


def test_a_ticker_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: each count, then the end; of the event engine's nodes and of the parts of `simulate`."""
    said: list[object] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            said.append((options["desc"], options["total"]))

        def update(self, added: int) -> None:
            said.append(added)

        def close(self) -> None:
            said.append("closed")

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    run = simulate("multi-cdp", 32, steps=8, engine="simpy")
    nodes = run.program.nodes
    assert said[:4] == [("simulate", 3), 1, 1, ("events", nodes)]
    assert said[-2:] == ["closed", "closed"]
    added = [value for value in said[4:-2] if isinstance(value, int)]
    assert nodes - 2**14 < sum(added) <= nodes
    assert len(added) == len(said) - 6 > 0


def test_what_is_quick_shows_no_progress(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert command("table1", "-n", 2).code == 0
    assert terminal.getvalue() == ""


# Commands


def test_schedules_are_listed_in_every_form(command: Command) -> None:
    text = command("schedules")
    assert (text.code, text.err) == (0, "")
    table, notes = text.out.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["schedule", "-" * 23, *SCHEDULES]
    assert notes.startswith("names of dp with --zero: ddp 0, zero-1 1, zero-2 2, zero-3 and fsdp 3\n")
    listed = json.loads(command("schedules", "--format", "json").out)
    assert [row["schedule"] for row in listed] == list(SCHEDULES)
    assert listed[0]["options"] == list(options_beyond_usual(SCHEDULES["single-dp"])) == []
    rows = list(csv.DictReader(io.StringIO(command("schedules", "--format", "csv").out)))
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    assert [row["options"].split() for row in rows] == [row["options"] for row in listed]


TABLES = (
    *("schedules", "pyramid -n 3", "models", "clusters", "models gpt2", "superpose vit-b16 -n 4"),
    *("import-schedule x.csv", "breakeven multi-dp -n 3 --model toy.toml --cluster box.toml"),
)


@pytest.mark.parametrize("line", TABLES)
def test_only_tables_of_papers_are_latex_and_none_is_markdown(line: str, command: Command, here: Path) -> None:
    only = "format: 'latex' is for table1 and compare only; give text, json, csv"
    refuse(command, here, f"{line} --format latex", only)
    refuse(command, here, f"{line} --format markdown", "format: unknown format 'markdown'; known are text, json, csv")
    for paper in ("table1 -n 3", "compare multi-dp -n 3"):
        assert command(*paper.split(), "--format", "latex").code == 0
        unknown = "format: unknown format 'markdown'; known are text, json, csv, latex"
        refuse(command, here, f"{paper} --format markdown", unknown)


EFFECTS = {
    "multi-cdp": ["--steps 4", "--rule cdp-v1", "--prefetch 1", "--model toy.toml --cluster box.toml"],
    "multi-dp": ["--collective ring"],
    "single-cdp": ["--slot-order backward-first --cluster lane.toml", "--model toy.toml"],
}


@pytest.mark.parametrize(("name", "options"), [(name, option) for name in EFFECTS for option in EFFECTS[name]])
def test_every_option_has_an_effect(name: str, options: str, command: Command, here: Path) -> None:
    line = f"simulate {name} -n 3"
    (here / "lane.toml").write_text("[devices]\nlanes = 1\n")
    plain = "--cluster lane.toml" if options.startswith("--slot-order") else ""
    assert command(*f"{line} {plain} -o a".split()).code == 0
    assert command(*f"{line} {options} -o b".split()).code == 0
    one, other = content(here / "a"), content(here / "b")
    assert one["summary.json"] != other["summary.json"]
    assert (one["tasks.csv"] != other["tasks.csv"]) == (options.split()[0] not in ("--prefetch", "--collective"))


def test_shared_parameters_change_the_rows_of_one_device(command: Command) -> None:
    tables = [json.loads(command("table1", "-n", 3, "--format", "json", *o).out) for o in ([], ["--shared-parameters"])]
    differing = [one["schedule"] for one, other in zip(*(t["rows"] for t in tables), strict=True) if one != other]
    assert differing == ["single-dp", "single-cdp"]


def test_the_toy_files_of_the_tests_are_served(command: Command, here: Path) -> None:
    assert "repeat = 2" in TOY_MODEL
    for name in TABLE_1:
        line = f"simulate {name} --model toy.toml --cluster box.toml -o {name}"
        assert command(*line.split()) == (0, "", "")


def test_the_pyramid_is_printed(command: Command) -> None:
    """Stage by stage, with sums."""
    out = command("pyramid", "-n", "3").out
    rows = [line.split() for line in out.splitlines()]
    assert rows[2:] == [
        ["0", "3", "3", "3", "3"],
        ["1", "2", "2", "2", "2"],
        ["2", "1", "1", "1", "1"],
        ["all", *"6666"],
    ]
    assert "-" in command("pyramid", "-n", "65", "--steps", "2").out.splitlines()[-1]


def test_the_pyramid_s_json_is_the_contract_s(command: Command) -> None:
    """Keys, order, and an assignment for every occupancy."""
    result = json.loads(command("pyramid", "-n", "3", "--format", "json").out)
    assert list(result) == ["n", "devices", "bound", "period", "period_is", "stages", "assignment"]
    assert (result["period"], result["period_is"]) == (6, "certified")
    assert (result["n"], result["devices"], result["bound"]) == (3, 6, 6)
    assert result["stages"][0] == {"stage": 0, "devices": 3, "bound": 3, "overlap": 3, "path_cover": 3}
    assert result["assignment"][0] == {"stage": 0, "micro_batch": 0, "step": 0, "device": 0}
    assert len(result["assignment"]) == 3 * 3 * 3


@every_row(
    ("line", "fragment"),
    [
        ("pyramid", "n: is missing"),
        ("pyramid mp-cd -n 3", "did you mean 'mp-cdp'"),
        ("pyramid -n 3 --format yaml", "unknown format 'yaml'"),
        ("pyramid -n 300 --max-memory 1GB --steps 9", "n=199 or steps=3 would fit"),
        ("simulate mp-cdp -n 300 --max-memory 2kB -o out", "0.002 MB is what --max-memory allows"),
        ("simulate mp-cdp -n 3 --max-memory lots -o out", "max-memory: 'lots': not a size"),
        ("simulate mp-cdp -n 3 --max-memory 80 -o out", "max-memory: '80': no unit; write for example '80 GB'"),
        ("table1 -n 300 --max-memory 1MB", "n=10 would fit"),
        ("simulate mp-cdp -n 3 --max-memory 2kB -o out", "the most; allow more"),
    ],
)
def test_what_the_pyramid_and_the_limit_cannot_serve(command: Command, here: Path, line: str, fragment: str) -> None:
    """One line each."""
    refuse(command, here, line, fragment)


def test_without_a_folder_a_summary_is_printed(command: Command, here: Path) -> None:
    """Six lines; as JSON the bytes of summary.json, with the quantiles of many runs, too."""
    outcome = command("simulate", "1f1b", "-n", 4, "-m", 8)
    assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 6)
    assert outcome.out.startswith(
        "run          1f1b: 4 stages, 8 micro-batches, 4 devices; in slots\nstep time    22 sl"
    )
    for number, options in enumerate(("", "--jitter uniform:0.1 --runs 9")):
        words = f"simulate multi-cdp --model toy.toml --cluster box.toml {options}".split()
        assert command(*words, "-o", number) == (0, "", "")
        printed = command(*words, "--format", "json")
        assert (printed.code, printed.err) == (0, "")
        assert printed.out.encode() == (here / str(number) / "summary.json").read_bytes()


def test_checking_says_how_much_held(command: Command, here: Path) -> None:
    """To stderr; the traces are written as without."""
    outcome = command("simulate", "mp-cdp", "-n", "3", "--check", "-o", "checked")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"cdpsim: {len(INVARIANTS)} invariants hold\n"
    assert (here / "checked" / "summary.json").exists()


def test_a_violation_is_said_and_nothing_written(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, the invariant by its name."""

    def broken(run: object) -> Iterator[str]:
        yield "U(t=0,j=0) on device 2 is wrong"

    monkeypatch.setitem(INVARIANTS, "dependencies_are_kept", broken)
    outcome = command("simulate", "mp-cdp", "-n", "3", "--check", "-o", "checked")
    assert (outcome.code, outcome.err) == (1, "cdpsim: dependencies are kept: U(t=0,j=0) on device 2 is wrong\n")
    assert not (here / "checked").exists()


def test_the_pyramid_takes_as_many_steps_as_it_needs(command: Command, here: Path) -> None:
    """Spec section 5's uneven stages, which wait for fresh parameters before they settle."""
    stages = "".join(f'[[stages]]\nforward = "{f} s"\nbackward = "{b} s"\n' for f, b in ((5, 3), (5, 6)))
    (here / "uneven.toml").write_text(stages, encoding="utf-8")
    out = command("pyramid", "--model", "uneven.toml").out
    assert [line.split()[:3] for line in out.splitlines()[2:]] == [["0", "2", "2"], ["1", "2", "2"], ["all", "4", "4"]]
