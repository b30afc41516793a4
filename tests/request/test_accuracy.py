"""Errors beside answers: the table is that of the committed reports, and each answer has the rows of its classes."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from cdpsim import compare, plan, simulate
from cdpsim.request import accuracy
from cdpsim.request.accuracy import KnownError
from tests.conftest import Command

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "validation" / "results"
GPT2 = {"model": "gpt2", "cluster": "h100-node"}
NO_KERNELS = "of steps by shapes and kernels: not measured"
FLOP, STAGE_TIMES, NCCL = "steps by FLOP at 43 % of peak", "steps by stage times", "messages on NCCL"
TORCH, PAPER = "memory of torch's runtimes", "memory of torch's runtimes by runtime paper"


def reports(beginning: str) -> list[Any]:
    """The committed reports whose files' names begin so."""
    return [json.loads(path.read_bytes()) for path in sorted(RESULTS.glob(f"{beginning}*.json"))]


def battery_errors(beginning: str) -> list[float]:
    """The errors of makespans in a battery."""
    return [each["time"]["relative_error"] for own in reports(beginning) for each in own["reports"] if each["time"]]


def peer_errors(runtime: str) -> list[float]:
    """The error of each run of torch's runtimes on its worst rank."""
    ranks = [
        [device["simulated"][runtime]["relative_error"] for device in peer["devices"]]
        for own in reports("peers")
        for peer in own["peers"]
    ]
    return [max(errors, key=abs) for errors in ranks]


def flop_of_step(config: dict[str, Any], tokens: int, length: int) -> float:
    """Six for each weight of a product and token; an attention's forward 4 s d, its fused backward 2.5 times that."""
    if config["model_type"] == "gpt2":
        width, layers, weights = config["n_embd"], config["n_layer"], 12 * config["n_embd"] ** 2
    else:
        width, layers, kv = config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]
        shared = 2 + 2 * kv / config["num_attention_heads"]
        weights = shared * width**2 + 3 * width * config["intermediate_size"]
    products = layers * weights + width * config["vocab_size"]
    flop: float = tokens * (6 * products + 3.5 * layers * 4 * length * width)
    return flop


def flop_errors() -> list[float]:
    """The errors of the H100's steps by their FLOP at 43 % of its data sheet's peak, dense."""
    peaks = {"float32": 67e12, "bfloat16": 989.5e12}
    found = []
    for own in reports("hugging-face"):
        for step in own["steps"]:
            flop = flop_of_step(step["config"], step["batch"] * step["length"], step["length"])
            kind = "bfloat16" if step["autocast"] else step["dtype"]
            found.append(flop / (0.43 * peaks[kind]) / step["seconds"] - 1)
    return found


def profile_errors() -> list[float]:
    """The errors of passes by the predictions that the page of results shows, which profiles make."""
    page = (PROJECT / "docs" / "results.md").read_text(encoding="utf-8")
    steps = [step for own in reports("hugging-face") for step in own["steps"]]
    measured = [step["peak"] - step["before"] for step in steps]
    [shown] = zip(*(page.partition(f"  {nbytes:,}  ")[2].split()[:1] for nbytes in measured), strict=True)
    return [int(own.replace(",", "")) / nbytes - 1 for own, nbytes in zip(shown, measured, strict=True)]


def timed_peers() -> list[float]:
    """The errors of the times of torch's runtimes."""
    return [peer["time"]["relative_error"] for own in reports("peers") for peer in own["peers"] if peer["time"]]


EXPECTED = {
    (STAGE_TIMES, "CPU"): lambda: battery_errors("battery-cpu") + timed_peers(),
    (STAGE_TIMES, "H100"): lambda: battery_errors("battery-cuda"),
    (FLOP, "H100"): flop_errors,
    (TORCH, "CPU"): lambda: peer_errors("torch"),
    (PAPER, "CPU"): lambda: peer_errors("paper"),
    ("memory by profiles", "H100"): profile_errors,
}


def rows() -> Iterator[KnownError]:
    """All rows of the table."""
    for _, own in accuracy._rows_of_classes():
        yield own


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row[0]} on {row[1]}") for row in EXPECTED])
def test_a_row_has_the_errors_of_its_reports(row: tuple[str, str]) -> None:
    """To the four digits of the table."""
    [found] = [own for own in rows() if (f"{own.of} {own.by}", own.on) == row]
    errors = EXPECTED[row]()
    assert found.runs == len(errors)
    figures = fmean(map(abs, errors)), min(errors), max(errors)
    assert (found.mean, found.lowest, found.largest) == pytest.approx(figures, rel=5e-4)


def test_rows_name_their_machines() -> None:
    known: dict[str | None, set[str]] = {}
    for own in rows():
        known.setdefault(own.on, set()).update(own.machines)
    environments = [own["environment"] for name in ("battery", "hugging-face", "peers") for own in reports(name)]
    gpus = {own["cuda"]["name"] for own in environments if "cuda" in own}
    assert known["H100"] == gpus == {"NVIDIA H100 80GB HBM3"}
    assert known["CPU"] == {own["cpu"]["model"] for own in environments if "cuda" not in own}
    assert known.keys() == {"CPU", "H100", None}
    assert {own.runs for own in rows() if own.on is None} == {0}


def test_the_page_of_results_has_all_rows() -> None:
    words = "\n".join(line.removeprefix("of ") for line in accuracy.error_words(rows()))
    assert f"```text\n{words}\n```" in (PROJECT / "docs" / "results.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_committed_reports() -> None:
    """Each report is in it by its digest: make it anew by the command of its first line where one is another."""
    table = (RESULTS / "classes.toml").read_text(encoding="utf-8")
    digests = {path.name: sha256(path.read_bytes()).hexdigest() for path in RESULTS.glob("*.json")}
    found = dict(line.split(" = ") for line in table.partition("[reports]\n")[2].partition("\n\n")[0].splitlines())
    assert {json.loads(name): json.loads(digest) for name, digest in found.items()} == digests


def classes(errors: tuple[KnownError, ...]) -> list[str]:
    """The classes of errors, each once."""
    return [*dict.fromkeys(f"{own.of} {own.by}" for own in errors)]


LAYERS = {"layers": 2, "width": 64, "heads": 2, "length": 16, "vocabulary": 50}
PASSES = {"forward": "1 s", "backward": "2 s", "activation": "1 GB", "parameters": "1 GB"}
HERE = {"link": {"latency": "1 us", "bandwidth": "1 GB/s"}}


def stages(**changed: str) -> dict[str, Any]:
    """A model of two stages."""
    return {"stages": [PASSES | changed] * 2}


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("1f1b", {"n": 4}, []),
        ("1f1b", {"n": 4, "runtime": "torch"}, []),
        ("1f1b", {"model": stages()}, [STAGE_TIMES, PAPER]),
        ("1f1b", {"model": stages(), "cluster": HERE}, [STAGE_TIMES, PAPER, NCCL]),
        ("1f1b", {"model": stages(), "runtime": "torch", "cluster": HERE}, [STAGE_TIMES, TORCH, NCCL]),
        ("1f1b", {"model": stages(), "runtime": "torch:sends=until-sent"}, [STAGE_TIMES, TORCH]),
        ("1f1b", {"model": stages(), "runtime": "held"}, [STAGE_TIMES, "memory of other runtimes"]),
        ("single-dp", {"model": stages(), "cluster": HERE}, [STAGE_TIMES, "memory by profiles"]),
        ("single-dp", {"model": stages(activation="0 B", parameters="0 B")}, [STAGE_TIMES]),
        (
            "single-dp",
            {
                "model": stages(forward="1 TFLOP", backward="2 TFLOP"),
                "cluster": {"devices": {"speed": "1 TFLOPS"}},
            },
            [FLOP, "memory by profiles"],
        ),
        ("dp", GPT2 | {"m": 1}, [FLOP, "memory by shapes"]),
        ("dp", GPT2 | {"replicas": 2, "runtime": "torch"}, [FLOP, TORCH, "memory by shapes", NCCL]),
        ("dp", GPT2 | {"m": 1, "runtime": "transformers"}, [FLOP, TORCH, "memory by shapes with runtime transformers"]),
        ("dp", GPT2 | {"m": 1, "tensor": 2}, [FLOP, "memory by shapes", NCCL]),
        ("dp", GPT2 | {"m": 1, "cluster": "a100-nodes"}, ["steps by shapes and kernels", "memory by shapes"]),
    ],
)
def test_an_answer_has_the_classes_of_its_request(schedule: str, options: dict[str, Any], expected: list[str]) -> None:
    """A run and the row of a comparison alike."""
    run = simulate(schedule, **options)
    assert classes(run.errors) == expected
    compared = compare([run.request], sort="given")
    assert compared[0].errors == run.errors == compared.errors


def shown(of: str) -> str:
    """What a line says of a class: the mean, the ends, and on how many runs of which device."""
    found = []
    for (name, device), own in EXPECTED.items():
        if name == of:
            errors = own()
            mean, low, high = (float(f"{100 * e:.2g}") for e in (fmean(map(abs, errors)), min(errors), max(errors)))
            found.append(f"{mean:g} % ({low:+g} to {high:+g} %, {len(errors)} runs on {device})")
    return f"of {of}: {', '.join(found)}"


def test_a_comparison_ends_in_the_line_of_its_classes(command: Command, here: Path) -> None:
    asked = ["compare", "dp", "1f1b", "--devices", "2", "--model", "toy.toml", "--cluster", "box.toml"]
    line = f"mean error {shown(STAGE_TIMES)}; {shown(TORCH)}; of messages on NCCL: not measured\n"
    assert command(*asked, "--runtime", "torch").out.endswith(line)
    rows = json.loads(command(*asked, "--runtime", "torch", "--format", "json").out)
    assert isinstance(rows, list)
    [errors] = {json.dumps(row["errors"]) for row in rows}
    assert [row["runs"] for row in json.loads(errors)] == [38, 13, 80, 0]
    assert json.loads(errors)[2] == {
        "of": "memory",
        "by": "of torch's runtimes",
        "on": "CPU",
        "machines": ["AMD EPYC"],
        "runs": 80,
        "mean": pytest.approx(fmean(map(abs, peer_errors("torch"))), rel=5e-4),
        "lowest": pytest.approx(min(peer_errors("torch")), rel=5e-4),
        "largest": pytest.approx(max(peer_errors("torch")), rel=5e-4),
    }
    assert "mean error" in command(*asked, "--format", "latex").out
    assert "error" not in command(*asked, "--format", "csv").out


def test_a_class_without_reports_is_not_measured(command: Command) -> None:
    """Steps by kernels, and messages on NCCL."""
    asked = ["compare", "dp", "--replicas", "2", "--model", "gpt2", "--cluster", "a100-nodes"]
    assert f"mean error {NO_KERNELS}; of memory by shapes: " in command(*asked).out
    [row] = json.loads(command(*asked, "--format", "json").out)
    assert row["errors"][0] == {"of": "steps", "by": "by shapes and kernels", "runs": 0}
    assert row["errors"][-1] == {"of": "messages", "by": "on NCCL", "runs": 0}


def test_a_run_says_a_line_for_each_class(command: Command, here: Path) -> None:
    asked = ["simulate", "1f1b", "--model", "toy.toml", "--cluster", "box.toml"]
    *_, first, second, third, last = command(*asked).out.splitlines()
    assert f"{first.strip()}, {second.partition(': ')[2]}" == f"mean error   {shown(STAGE_TIMES)}"
    assert second.partition(": ")[0] == f"             of {STAGE_TIMES}"
    assert (third, last) == (f"             {shown(PAPER)}", "             of messages on NCCL: not measured")
    summary = json.loads(command(*asked, "--format", "json").out)
    assert [row["by"] for row in summary["errors"]] == ["by stage times"] * 2 + [
        "of torch's runtimes by runtime paper",
        "on NCCL",
    ]


def test_slots_have_no_errors(command: Command) -> None:
    for words in ("simulate 1f1b -n 4", "compare 1f1b -n 4", "plan --devices 2 --batch 2 --schedules 1f1b"):
        assert "error" not in command(*words.split()).out
        assert "errors" not in command(*words.split(), "--format", "json").out


def test_a_plan_has_the_errors_of_its_rows(command: Command, here: Path) -> None:
    asked: dict[str, Any] = {
        "devices": 2,
        "batch": 2,
        "model": str(here / "toy.toml"),
        "cluster": str(here / "box.toml"),
    }
    found = plan(**asked, schedules=["1f1b"], n=2, top=1)
    assert classes(found.errors)[0] == STAGE_TIMES
    assert str(found).splitlines()[-1].startswith(f"mean error {shown(STAGE_TIMES)}; ")
    content = found.to_builtins()
    assert [row["errors"][0]["runs"] for row in content["rows"]] == [38]


def test_a_package_without_the_harness_knows_no_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accuracy, "__file__", str(tmp_path / "cdpsim" / "request" / "accuracy.py"))
    accuracy._rows_of_classes.cache_clear()
    assert simulate("1f1b", model=stages()).errors == ()
    (tmp_path / "cdpsim_validation" / "results").mkdir(parents=True)
    table = tmp_path / "cdpsim_validation" / "results" / "classes.toml"
    table.write_text((RESULTS / "classes.toml").read_text(encoding="utf-8"), encoding="utf-8")
    accuracy._rows_of_classes.cache_clear()
    assert classes(simulate("1f1b", model=stages()).errors) == [STAGE_TIMES, PAPER]
    accuracy._rows_of_classes.cache_clear()


def test_a_break_even_has_the_errors_of_its_times(command: Command, here: Path) -> None:
    asked = ["breakeven", "1f1b", "--model", "toy.toml", "--cluster", "box.toml"]
    last = command(*asked).out.splitlines()[-1]
    assert last == f"mean error {shown(STAGE_TIMES)}; of messages on NCCL: not measured"
    rows = json.loads(command(*asked, "--format", "json").out)
    assert [row["of"] for row in rows[0]["errors"]] == ["steps", "steps", "messages"]
