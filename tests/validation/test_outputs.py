"""Every command of the harness that writes: an output that is there is refused last, and an input is kept."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.validation.made_reports import Made
from validation.__main__ import main
from validation.report import schema as reportform

# Each command, but for its -o; what it writes; and mistakes.
WRITING = {
    "replay multi-cdp -n 2": (
        "old.json",
        [
            *("--steps x", "--repeats x", "--timeout never", "--device tpu", "--backend carrier-pigeon", "--batch 0"),
            *("--cluster lost.toml", "--stages lost.toml", "--rule lost.csv", "--size width", "--partition by-eye"),
            *("--single-process --timeout 3", "--single-process --backend nccl", "--collective telepathy"),
            "--model nothing",
        ],
    ),
    "profile mlp -n 2": (
        "old.toml",
        [
            *("-n 0", "--batch x", "--dtype int3", "--optimizer lion", "--device tpu", "--size width"),
            *("--partition by-eye", "--partition 9", "--attention x"),
        ],
    ),
    "calibrate": (
        "old.toml",
        [
            *("--ranks 1", "--device tpu", "--backend carrier-pigeon", "--model nothing", "--dtype int3", "--batch x"),
            *("--size width", "--partition by-eye", "--optimizer lion", "--stages stages.xml", "--stages old.toml"),
        ],
    ),
    "battery": ("old.json", ["--device tpu", "--no-such-option"]),
    "report reports": ("old.csv", ["--format xml", "--figure x.gif"]),
    "report lost": ("old.csv", ["--format csv"]),
    "report empty": ("old.csv", ["--format csv"]),
}
REFUSED = ["replay multi-cdp -n 2", "profile mlp -n 2", "calibrate", "battery", "report reports"]
MISTAKES = [(line, mistake) for line, (_, mistakes) in WRITING.items() for mistake in mistakes]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a report, and all outputs there already."""
    monkeypatch.chdir(tmp_path)
    for name in ("old.json", "old.toml", "old.csv", "old.png"):
        Path(name).write_text("precious")
    Path("reports").mkdir()
    Path("empty").mkdir()
    reportform.write_report("reports/report.json", Made().report())
    return tmp_path


@pytest.mark.parametrize(("line", "mistake"), MISTAKES)
def test_each_other_mistake_is_named_first(
    line: str, mistake: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the words that it has where no output is in its way."""
    output = WRITING[line][0]
    said = []
    for name in (output, output.replace("old", "new")):
        assert main([*line.split(), *mistake.replace("old.toml", name).split(), "-o", name]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        said.append(err.replace(name, "NAME"))
    assert said[0] == said[1]
    assert "already exists" not in said[0]
    assert Path(output).read_text() == "precious"


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_there_is_refused(line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = WRITING[line][0]
    assert main([*line.split(), "-o", output]) == 2
    assert capsys.readouterr().err == f"cdpsim: error: {output}: already exists; --force overwrites\n"
    assert Path(output).read_text() == "precious"


def test_what_a_command_has_read_it_does_not_overwrite(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration of a model, a cluster file, a file of stages, a report."""
    Path("box.json").write_text('{"devices": {"speed": "1 TFLOPS"}, "link": {"bandwidth": "1 GB/s"}}')
    assert main(["profile", "mlp", "-n", "2", "--size", "width=8", "--batch", "4", "-o", "stages.json"]) == 0
    shutil.copy("reports/report.json", "reports/battery.json")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    replay = "replay multi-cdp -n 2 --size width=8 --single-process"
    for line, output in (
        (f"{replay} --stages stages.json", "stages.json"),
        (f"{replay} --cluster box.json", "box.json"),
        ("report reports --format json", "reports/battery.json"),
    ):
        capsys.readouterr()
        assert main([*line.split(), "-o", output, "--force"]) == 2
        assert capsys.readouterr().err == f"cdpsim: error: {output}: is read by this command; write to another name\n"
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
