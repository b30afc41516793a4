"""Ten commands with the lowest versions that the package allows: `python -m tests.lowest`, or `make lowest`.

Installs lowest.txt and the package into an environment of its own, which it removes. With --drawn it does so for one
commit in ten, which the commit decides: so CI does.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.selection import SHARES, chance, commit

PROJECT = Path(__file__).parent.parent
# matplotlib is used by pictures, networkx by `pyramid`, numba by `plan`, SimPy by contention, quantiphy by models.
COMMANDS = (
    "table1 -n 4",
    "pyramid -n 4",
    "simulate 1f1b -n 4 -m 8 --model gpt2 --cluster a100-nodes -o traces",
    "simulate multi-cdp -n 4 --model gpt2 --cluster pcie-box --contention fair --check",
    "compare gpipe 1f1b --devices 4 --batch 32 --model gpt2 --cluster a100-nodes -o compare.pdf",
    "timeline zb-h1 -n 4 -o timeline.svg",
    "timeline 1f1b -n 4 -o page.html",
    "plot memory mp-dp mp-cdp -n 4 -o memory.png",
    "figure 1 -o figure.pgf",
    "plan --model gpt2 --cluster a100-nodes --devices 4 --batch 64 --memory 5GB -o plan.csv",
)
# What commands use only on a terminal, or from Python.
OTHERS = "import tqdm, cdpsim; cdpsim.Model.load('gpt2').save('gpt2.toml')"


def is_drawn(word: str) -> bool:
    """Return whether the draw of a commit tries the lowest versions."""
    return chance(word, "lowest versions") < SHARES["lowest versions"]


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command in a folder, without other folders on Python's path; end this program where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{Path(command[0]).name} ends with {done.returncode} with the versions of lowest.txt")


def main(arguments: list[str]) -> None:
    """Install the lowest versions, and run the commands with them."""
    word = commit(PROJECT)
    if "--drawn" in arguments and not is_drawn(word):
        print(f"the draw of {word} leaves the lowest versions out; make lowest tries them")
        return
    with TemporaryDirectory() as folder:
        home = Path(folder)
        run(sys.executable, "-m", "venv", "environment", cwd=home)
        programs = home / "environment" / "bin"
        pip = (programs / "python", "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check")
        run(*pip, "-c", PROJECT / "lowest.txt", "-e", PROJECT, cwd=home)
        run(programs / "python", "-c", OTHERS, cwd=home)
        for line in COMMANDS:
            run(programs / "cdpsim", *line.split(), cwd=home)
    print(f"{len(COMMANDS)} commands run with the versions of lowest.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
