"""The environment of a result: versions and machine, as plain JSON, without names of hosts, users or folders."""

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import torch

import cdpsim
from cdpsim.version import __version__

from ..training.modules import installed

_HARNESS = Path(__file__).parents[1]
_FOLDERS = {"cdpsim": Path(cdpsim.__file__).parent, "validation": _HARNESS}  # wherever they are, the same names


def environment(device: str = "cpu") -> dict[str, object]:
    """Return date, versions and machine; of GPUs only where `device` is one."""
    memory = _kernel_value("/proc/meminfo", "MemTotal")
    found: dict[str, object] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cdpsim": __version__,
        "commit": _commit(),
        "source": source_hash(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # which is a subclass of text
        "transformers": installed("transformers"),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "model": _kernel_value("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
            "count": os.cpu_count(),
            "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
    }
    if torch.device(device).type == "cuda":
        found["cuda"] = _cuda(torch.device(device))
    return found


def source_hash() -> str:
    """Return a hash of the code of simulator and harness, and of its tables but those of results, committed or not."""
    digest = sha256()
    for name, folder in _FOLDERS.items():
        known = (
            path for path in folder.rglob("*") if path.suffix in (".py", ".toml") and path.parent.name != "results"
        )
        for path in sorted(known):
            digest.update(f"{name}/{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _cuda(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    cudnn: Callable[[], object] = torch.backends.cudnn.version  # without types of its own, as the next one
    nccl: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "cudnn": cudnn(),
        "nccl": ".".join(map(str, nccl())) if torch.distributed.is_nccl_available() else None,
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
    }


def _commit() -> str | None:
    """Return the commit of this checkout, marked where files differ from it; None where this is no checkout."""
    if not (_HARNESS.parent / ".git").exists():  # an installation may lie in the checkout of another project
        return None
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return f"{head} (changed)" if _output("git", "status", "--porcelain", "--untracked-files=no") else head


def _output(*command: str) -> str | None:
    """Return the output of a command in the checkout; None where the command is missing or fails."""
    try:
        done = subprocess.run(command, cwd=_HARNESS.parent, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _kernel_value(file: str, name: str) -> str | None:
    """Return the value of the first line `name: value` of one of the kernel's files."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), None)
