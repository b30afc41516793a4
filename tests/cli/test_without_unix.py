"""Nothing needs Unix: the tests take away all calls, flags and signals that Python on Windows lacks."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cdpsim
from cdpsim import limits, simulate
from cdpsim.limits import free_bytes

# Names that the documentation of Python marks "Availability: Unix", and modules that are there alone.
CALLS = ["sysconf", "statvfs", "getuid", "geteuid", "fork", "setsid", "getpgid", "killpg", "chown", "mkfifo", "pread"]
FLAGS = ["O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_SYNC", "O_NONBLOCK"]
MODULES = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"]
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
WITHOUT = f"""
import os, signal, sys
for name in {CALLS + FLAGS!r}:
    if hasattr(os, name):
        delattr(os, name)
for name in {MODULES!r}:
    sys.modules[name] = None
for name in [name for name in vars(signal) if name.startswith("SIG") and name[3:4] != "_"]:
    if name not in {SIGNALS!r}:
        delattr(signal, name)
for name in ("alarm", "setitimer", "pthread_sigmask", "sigwait", "pause"):
    delattr(signal, name)
opened = os.open
def refusing(path, *arguments, **more):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied")  # as Windows says of all folders
    return opened(path, *arguments, **more)
os.open = refusing
from cdpsim.cli import main
for line in sys.argv[1:]:
    assert main(line.split()) == 0, line
"""


@pytest.mark.slow
def test_ordinary_commands_need_nothing_of_unix(tmp_path: Path) -> None:
    lines = ["simulate 1f1b -n 3 -o run", "simulate 1f1b -n 3 -o run --force", "table1 -n 3", "compare -n 4"]
    lines += ["timeline run -o a.svg", "timeline run -o a.json", "plot memory 1f1b -n 3 -o b.png"]
    environment = os.environ | {"PYTHONPATH": str(Path(cdpsim.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *lines],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a.svg", "a.json", "b.png"}


@pytest.fixture
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No system says anything in /proc or /sys, nor by sysconf."""

    def read_text(path: Path, **_: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.delattr(os, "sysconf")


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX, as the Windows API documents it."""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    )


def test_windows_says_what_is_free(without_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(given: Any) -> int:
        status = MemoryStatus.from_buffer(given)
        assert status.dwLength == ctypes.sizeof(MemoryStatus)
        status.dwMemoryLoad, status.ullTotalPhys, status.ullAvailPhys = 56, 16 * 2**30, 7 * 2**30
        return 1

    kernel = SimpleNamespace(GlobalMemoryStatusEx=fill)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert free_bytes() == 7 * 2**30
    kernel.GlobalMemoryStatusEx = lambda given: 0  # it fails
    assert free_bytes() == sys.maxsize


def test_a_system_that_says_nothing_limits_nothing(without_files: None) -> None:
    """But --max-memory does, and so do 32-bit numbers."""
    assert free_bytes() == sys.maxsize
    assert simulate("1f1b", 2).summary()["devices"] == 2
    with pytest.raises(cdpsim.RequestError, match="is what --max-memory allows"):
        simulate("1f1b", 100, max_memory="1 MB")
    with pytest.raises(cdpsim.RequestError, match=f"{limits.MOST_TASKS:,} tasks are the most"):
        simulate("1f1b", 10**5)
