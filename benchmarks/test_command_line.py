"""Time of the command line as a user waits for it: a process from its start to its end."""

import subprocess
import sys
from typing import Any

import pytest

COMMANDS = {
    "import": ["-c", "import cdpsim"],
    "help": ["-m", "cdpsim", "--help"],
    "table1 -n 64": ["-m", "cdpsim", "table1", "-n", "64"],
    "bare python": ["-c", "pass"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command(name: str, benchmark: Any) -> None:
    """Start one process a round."""
    command = [sys.executable, *COMMANDS[name]]
    benchmark.pedantic(subprocess.run, (command,), {"check": True, "capture_output": True}, rounds=7, warmup_rounds=1)
