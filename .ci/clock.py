"""Processor seconds of CI's parts, beside a fixed loop, so that a loaded machine says the same.

    python3 .ci/clock.py FILE run NAME COMMAND...    run a part, and add what it took to a file
    python3 .ci/clock.py FILE rate                   print what the loop takes now
    python3 .ci/clock.py FILE report BUDGET NAME     print the table; fail where a part is 1.3 times over its budget

The loop takes a second of an idle core of the machine on which the budget was set. It runs on two cores before and
after each part, and a part's seconds divided by the loop's are seconds of that machine.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

ROUNDS = 950_000  # of which four times as many take a second
LEEWAY = 1.3
LOOP = f"""
from time import process_time
begun, total, seen = process_time(), 0, {{}}
for k in range({ROUNDS}):
    total += k * k % 7
    seen[k % 1000] = seen.get(k % 1000, 0) + total
    total -= len([k, total, seen])
print(4 * (process_time() - begun))
"""


def rate() -> float:
    """Return the mean seconds of the loop, on two cores at once."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(loop.communicate()[0]) for loop in loops) / len(loops)


def processor_time() -> float:
    """Return the processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(file: Path, name: str, command: list[str]) -> int:
    """Run a part between two loops."""
    before, begun = rate(), processor_time()
    code = subprocess.run(command, check=False).returncode
    seconds = processor_time() - begun
    with file.open("a", encoding="utf-8") as parts:
        parts.write(json.dumps([name, seconds, (before + rate()) / 2]) + "\n")
    return code


def report(file: Path, budget: float, budgeted: str) -> int:
    """Print the parts; return 1 where the budgeted one is too far above its budget."""
    parts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    print(f"{'part':34} {'processor s':>12} {'loop s':>8} {'ratio':>8}")
    for name, seconds, loop in parts:
        print(f"{name:34} {seconds:12.0f} {loop:8.2f} {seconds / loop:8.0f}")
    every, loops = sum(seconds for _, seconds, _ in parts), sum(seconds / loop for _, seconds, loop in parts)
    print(f"{'all':34} {every:12.0f} {'':8} {loops:8.0f}")
    spent = next(seconds / loop for name, seconds, loop in parts if name == budgeted)
    if spent > LEEWAY * budget:
        print(f"{budgeted} took {spent:.0f} loops, more than {LEEWAY} x {budget:.0f} of .ci/budget", file=sys.stderr)
    return int(spent > LEEWAY * budget)


def main(file: str, what: str, *rest: str) -> int:
    """Do what the command line says."""
    if what == "run":
        return run(Path(file), rest[0], list(rest[1:]))
    if what == "report":
        return report(Path(file), float(rest[0]), rest[1])
    print(f"{rate():.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
