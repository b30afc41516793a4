"""Print the way of the simplest request: every function that it calls, in order: `python -m tests.way [--command]`.

In a fresh process, after the import, `simulate("1f1b", n=4, m=8)` and its repr; with `--command` what
`cdpsim simulate 1f1b -n 4 -m 8` calls. Prints the functions once each, under their modules in the order of first calls.
"""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "cdpsim") + "/"
COMMAND = "--command"


def functions_called(*, command: bool) -> list[tuple[str, str]]:
    """Return the module and the name of each function of the package that is called, in the order of first calls."""
    words = [sys.executable, "-m", "tests.way", "--here", *[COMMAND] * command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return [(module, name) for module, name in json.loads(done.stdout)]


def _record(*, command: bool) -> list[tuple[str, str]]:
    """Make the request in this process, and return what it calls."""
    from cdpsim import simulate
    from cdpsim.cli import main

    called: dict[tuple[str, str], None] = {}

    def see(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            module = file.removeprefix(PACKAGE).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            called.setdefault((module, frame.f_code.co_qualname))

    said = io.StringIO()
    sys.setprofile(see)
    with contextlib.redirect_stdout(said):
        if command:
            main(["simulate", "1f1b", "-n", "4", "-m", "8"])
        else:
            print(repr(simulate("1f1b", n=4, m=8)))
    sys.setprofile(None)
    assert "1f1b" in said.getvalue()
    return list(called)


if __name__ == "__main__":
    if "--here" in sys.argv:
        print(json.dumps(_record(command=COMMAND in sys.argv)))
    else:
        ways = functions_called(command=COMMAND in sys.argv)
        module = ""
        for where, name in ways:
            print(*([where] if where != module else []), f"    {name}", sep="\n")
            module = where
        print(f"{len(ways)} functions of {len({module for module, _ in ways})} modules")
