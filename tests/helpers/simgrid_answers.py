"""Arrivals of `tests/helpers/traffic_patterns.py` by SimGrid: computed where it is installed, and as committed.

python -m tests.helpers.simgrid_answers          # writes simgrid_arrivals.json anew; needs Debian's python3-simgrid
"""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.helpers.traffic import as_json
from tests.helpers.traffic_patterns import patterns

SCRIPT = Path(__file__).with_name("simgrid_arrivals.py")
COMMITTED = Path(__file__).with_name("simgrid_arrivals.json")


def with_simgrid() -> str | None:
    """Return a Python that has SimGrid's module; None if there is none."""
    for python in ("/usr/bin/python3", shutil.which("python3")):
        if python and Path(python).exists():
            done = subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False)
            if not done.returncode:
                return python
    return None


def patterns_as_json() -> str:
    """Return all patterns, as the script reads them."""
    return json.dumps([as_json(traffic, cluster) for _, cluster, traffic in patterns()])


def digest() -> str:
    """Return a hash of the patterns."""
    return hashlib.sha256(patterns_as_json().encode()).hexdigest()


def answer(python: str) -> dict[str, Any]:
    """Return when the messages of all patterns arrive according to SimGrid, and its version."""
    done = subprocess.run([python, str(SCRIPT)], input=patterns_as_json(), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    python = with_simgrid()
    assert python is not None, "no Python here has the module simgrid"
    COMMITTED.write_text(json.dumps(answer(python) | {"patterns": digest()}) + "\n")
