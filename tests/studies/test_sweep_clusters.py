"""Sweeps on Slurm and Dask: jobs within the limits of arrays, parts that go on, clusters that are not there."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cdpsim import RequestError
from cdpsim.studies.sweep import running
from cdpsim.studies.sweep.points import SweepPart
from cdpsim.studies.sweep.results import study_status
from cdpsim.studies.sweep.running import (
    Outcomes,
    SweepJob,
    check_slurm,
    dask_client,
    largest_array,
    run_on_dask,
    run_on_slurm,
)
from tests.conftest import Command
from tests.helpers.sweeps import FILE, saved

pytestmark = pytest.mark.skipif(os.name != "posix", reason="scripts of a shell stand for Slurm's programs")

# What `sbatch` gets is kept; a process behind it runs the tasks of the array one after another.
SBATCH = """#!{python}
import os, re, subprocess, sys, time
script = open(sys.argv[-1]).read()
open({log!r}, "a").write(script)
job = "1234"
array = re.search(r"--array=(\\d+)-(\\d+)%", script)
tasks = range(int(array[1]), int(array[2]) + 1) if array else [0]
print("Submitted batch job", job, flush=True)
if not {runs} or os.fork():
    os._exit(0)
nowhere = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(nowhere, stream)
folder = os.path.dirname(sys.argv[-1])
while not all(os.path.exists(f"{{folder}}/{{job}}_{{task}}_submitted.pkl") for task in tasks):
    time.sleep(0.01)  # a job begins when its task has been written
for task in tasks:
    environment = {{**os.environ, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "1"}}
    environment |= {{"SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}}
    if array:
        environment |= {{"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(task)}}
    subprocess.run(["bash", sys.argv[-1]], env=environment)
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == --* || $1 == /*.out || $1 == /*.err ]]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/sh\necho 'MaxArraySize            = {size}'\n"
SACCT = "#!/bin/sh\nexit 1\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Programs that stand for Slurm's; they return the file that has the scripts that were submitted."""

    def install(size: int = 1001, runs: bool = False) -> Path:
        folder, log = tmp_path / "bin", tmp_path / "scripts"
        folder.mkdir()
        texts = {
            "sbatch": SBATCH.format(python=sys.executable, log=str(log), runs=runs),
            "srun": SRUN,
            "scontrol": SCONTROL.format(size=size),
            "sacct": SACCT,
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return log

    return install


@pytest.mark.parametrize(("size", "workers", "jobs"), [(1001, 4, 4), (6, 100, 6), (1001, 100, 18)])
def test_an_array_has_no_more_jobs_than_slurm_and_the_sweep_allow(
    tmp_path: Path, slurm: Callable[..., Path], size: int, workers: int, jobs: int
) -> None:
    pytest.importorskip("submitit")
    log = slurm(size)
    saved(tmp_path / "sweep")
    run_on_slurm(tmp_path / "sweep", workers, {"partition": "short", "cpus_per_task": 3}, detach=True)
    script = log.read_text()
    assert re.findall("#SBATCH --array=(.*)", script) == [f"0-{jobs - 1}%{jobs}"]
    assert "#SBATCH --partition=short" in script
    assert "#SBATCH --cpus-per-task=3" in script
    assert "#SBATCH --time=60" in script


def test_jobs_of_an_array_do_all_points(
    tmp_path: Path, slurm: Callable[..., Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    slurm(runs=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    file = tmp_path / "sweep.toml"
    file.write_text(FILE)
    done = command("sweep", file, "-o", tmp_path / "out", "--on", "slurm", "--workers", "2", "--slurm", "time=5")
    assert done.code == 0, done.err
    assert "slurm: 2 jobs, 1234_0 and on; `cdpsim sweep status" in done.err
    assert done.err.endswith("18 done, 0 refused, 0 failed, 0 to do\n")


def test_parameters_that_slurm_does_not_have_are_refused(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    pytest.importorskip("submitit")
    slurm()
    saved(tmp_path / "sweep")
    with pytest.raises(RequestError, match="slurm: refused the jobs"):
        run_on_slurm(tmp_path / "sweep", 2, {"partitoin": "short"}, detach=True)


def test_without_slurm_or_submitit_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "submitit", ModuleType("submitit"))
    with pytest.raises(RequestError, match="slurm: there is no sbatch here; run this where jobs are submitted"):
        check_slurm()
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(RequestError, match=r"submitit: is not installed.*pip install 'cdpsim\[slurm\]'"):
        check_slurm()
    assert largest_array() == 1001


def test_a_job_whose_time_is_up_is_queued_again_with_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = ModuleType("submitit.helpers")
    helpers.DelayedSubmission = lambda *arguments: arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "submitit", ModuleType("submitit"))
    monkeypatch.setitem(sys.modules, "submitit.helpers", helpers)
    job = SweepJob()
    assert job.checkpoint("sweep", (2, 3)) == (job, "sweep", (2, 3))


class Task:
    """A task of a cluster that has run."""

    status = "finished"

    def done(self) -> bool:
        return True


class FakeClient:
    """A Dask client whose tasks run at once."""

    workers = ("a", "b")

    def __init__(self, address: str, timeout: int) -> None:
        self.address = address
        if address == "nowhere":
            raise OSError("timed out")

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        return {"workers": dict.fromkeys(self.workers if n_workers == -1 else self.workers[:1])}

    def submit(self, function: Callable[..., int], *arguments: Any, pure: bool, retries: int) -> Task:
        assert not pure
        assert retries > 1000
        function(*arguments)
        return Task()


@pytest.fixture
def dask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that stands for `distributed`."""
    module = ModuleType("distributed")
    module.Client = FakeClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distributed", module)


def test_each_worker_of_a_dask_cluster_does_a_part(
    tmp_path: Path, dask: None, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[tuple[str, SweepPart]] = []

    def run_part(folder: str, part: SweepPart, workers: int) -> Outcomes:
        assert workers == 1
        parts.append((folder, part))
        return Outcomes(result=9)

    monkeypatch.setattr(running, "run_part", run_part)
    file = tmp_path / "sweep.toml"
    file.write_text(FILE)
    done = command("sweep", file, "-o", tmp_path / "out", "--on", "dask://10.0.0.1:8786")
    assert done.err.endswith("0 done, 0 refused, 0 failed, 18 to do\n")
    assert parts == [(str(tmp_path / "out"), (k, 2)) for k in (1, 2)]


def test_a_cluster_that_is_not_there_is_refused(tmp_path: Path, dask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    with pytest.raises(RequestError, match="on: no Dask scheduler answers at nowhere"):
        dask_client("dask://nowhere")
    monkeypatch.setattr(FakeClient, "workers", ())
    with pytest.raises(RequestError, match="on: the Dask cluster has no workers"):
        run_on_dask(tmp_path, dask_client("dask://here"), None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(RequestError, match=r"distributed: is not installed.*pip install 'cdpsim\[dask\]'"):
        dask_client("dask://here")


@pytest.mark.parametrize("where", ["slurm", "dask://here"])
def test_a_sweep_that_cannot_begin_leaves_no_folder(
    where: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("submitit", "distributed"):
        monkeypatch.setitem(sys.modules, module, None)
    file = tmp_path / "sweep.toml"
    file.write_text(FILE)
    refused = command("sweep", file, "-o", tmp_path / "out", "--on", where)
    assert refused.code == 2
    assert "is not installed" in refused.err
    assert not (tmp_path / "out").exists()


def test_a_dask_cluster_on_this_machine_does_a_sweep(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    saved(tmp_path)
    settings = {
        "n_workers": 1,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "processes": False,
        "protocol": "tcp://",
    }
    with distributed.LocalCluster(host="127.0.0.1", **settings) as cluster:
        run_on_dask(tmp_path, dask_client(f"dask://{cluster.scheduler_address}"), 2)
    assert study_status(tmp_path).done == 18
