"""Ctrl-C from the first import of a command on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cdpsim

AT_AN_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize("module", ["cdpsim.cluster", "numpy", "cdpsim.program.assembly", "cdpsim.cli.parser"])
def test_ctrl_c_while_a_command_is_imported_is_as_quiet(module: str, tmp_path: Path) -> None:
    """From the first import of the package on; a program of others that imports it has its own way."""
    tmp_path.joinpath("sitecustomize.py").write_text(AT_AN_IMPORT)
    paths = os.pathsep.join([str(tmp_path), str(Path(cdpsim.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "INTERRUPTED_IMPORT": module}
    for words, code, said in (
        (["-m", "cdpsim", "schedules"], 130, "cdpsim: interrupted\n"),
        (["-c", "import cdpsim.cli"], -signal.SIGINT, "KeyboardInterrupt"),
    ):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr == said or (code < 0 and said in done.stderr)
