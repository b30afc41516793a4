"""The page on GPUs: its commands run on a CPU with a smaller model, and its script with two torchruns for two nodes."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import cdpsim
from tests.validation.processes import HANGS
from validation.__main__ import main

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "how-to" / "calibrate-and-replay.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?:^    .*\n)+", PAGE.partition("## Replay on several")[0], flags=re.MULTILINE)
# The words of the page's commands, and those in their place here.
SMALLER = {
    "--device cuda --backend nccl": "",
    "--model gpt2": "--model mlp",
    "--model transformer --size width=1024": "--model mlp",
    "--dtype bfloat16": "--dtype float32",
    "gpt2.toml": "mlp.toml",
    "zero-dp": "",
    "--ranks 8": "--ranks 2",
    "-n 8": "-n 2",
    "-n 16": "-n 2",
    "--nproc-per-node=8": "--nproc-per-node=2",
    "29500": "PORT",
}
PROGRAMS = {
    "python": 'exec "$PYTHON" "$@"',
    "cdpsim": 'exec "$PYTHON" -m cdpsim "$@"',
    "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"',
    "scontrol": "echo localhost; echo other",
    "srun": 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" & done; wait -n; wait -n',
}


def run_here(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of the page in a folder, with this Python and what stands in for Slurm."""
    for words, ours in SMALLER.items():
        script = script.replace(words, ours)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        script = script.replace("PORT", str(free.getsockname()[1]))
    programs = folder / "programs"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\nset -e\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "nodes", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7"}
    environment = os.environ | slurm | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-e"],
        input=script,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


@pytest.mark.slow
def test_what_follows_calibrate_runs_on_one_node(tmp_path: Path) -> None:
    """A comparison, and a replay by ranks of torchrun; a profile and a cluster that ships stand in for `calibrate`."""
    profile = shlex.split("profile mlp -n 2 --batch 8 --dtype float32 --optimizer momentum -o")
    assert main([*profile, str(tmp_path / "mlp.toml")]) == 0
    cdpsim.Cluster.load("pcie-box").save(tmp_path / "node.toml")
    _, _, compare, replay = COMMANDS
    done = run_here(compare + replay, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "report.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_calibrate_lacks_nothing_but_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(COMMANDS[1].replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "validation"]
    assert main([str(tmp_path / word) if word.endswith(".toml") else word for word in words[3:]]) == 2
    assert "nccl needs a GPU for each rank; there are 0 for 8 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_for_slurm_replays_on_two_nodes(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    done = run_here(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report-7.json").exists()
    assert done.stdout.endswith("ok\n")
