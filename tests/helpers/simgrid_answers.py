"""What SimGrid answers to `tests/helpers/traffic_patterns.py`: live where it is installed, and as committed.

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
    """A Python that has SimGrid's module."""
    for python in ("/usr/bin/python3", shutil.which("python3")):
        if python and Path(python).exists():
            done = subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False)
            if not done.returncode:
                return python
    return None


def asked() -> str:
    """All patterns, as the script reads them."""
    return json.dumps([as_json(traffic, cluster) for _, cluster, traffic in patterns()])


def digest() -> str:
    """What tells these patterns from others."""
    return hashlib.sha256(asked().encode()).hexdigest()


def answer(python: str) -> dict[str, Any]:
    """When the messages of all patterns arrive according to SimGrid, and its version."""
    done = subprocess.run([python, str(SCRIPT)], input=asked(), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    python = with_simgrid()
    assert python is not None, "no Python here has the module simgrid"
    COMMITTED.write_text(json.dumps(answer(python) | {"patterns": digest()}) + "\n")
