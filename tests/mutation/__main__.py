"""Mutation of the core: does a test fail where a line is wrong?  python -m tests.mutation SEED [--count 100].

Mutants are drawn by the seed alone, and made in a copy of the tree. Each meets the tests that cover its lines, the
cheapest that together took a minute, until one fails. It is killed where a test fails, cannot be imported, or does not
end in two minutes; it survives where all pass. Mutants that no test can tell from the original are listed in
`equivalent.toml`, with a reason each. The exit code is 1 where fewer than 95 % of the others are killed.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.mutation.covering import PROJECT, Covering, failing, import_what_tests_need, measure
from tests.mutation.mutants import Mutant, mutants

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
KEPT = PROJECT / "build" / "mutation"
# Modules that read requests, write files, draw or print are not the core.
SHELL = [
    "__init__",
    "__main__",
    "cli",
    "draw",
    "errors",
    "experiment",
    "export",
    "files",
    "limits",
    "presets",
]
SHELL += ["request", "setting", "version"]
ENOUGH = 0.95  # of those that differ


def core() -> Iterator[str]:
    """List the files of the core, relative to the project."""
    for path in sorted((PROJECT / "cdpsim").rglob("*.py")):
        if path.relative_to(PROJECT / "cdpsim").parts[0].removesuffix(".py") not in SHELL:
            yield str(path.relative_to(PROJECT))


def drawn(seed: str, count: int, at: str) -> list[Mutant]:
    """Draw mutants by a seed, of all files whose `file:function` begins like this.

    Each has a number of its own, by the seed and its name: what is drawn stays the same where code changes elsewhere.
    """
    every = [one for file in core() for one in mutants(file, source(file))]
    every = [one for one in every if f"{one.file}:{one.function}".startswith(at)]
    return sorted(every, key=lambda one: hashlib.sha256("\0".join((seed, *name_of(one))).encode()).digest())[:count]


def name_of(mutant: Mutant) -> tuple[str, str, str, str]:
    """Name a mutant by its function and its lines, which stay when others move."""
    return mutant.file, mutant.function, *mutant.change(source(mutant.file))


@cache
def source(file: str) -> str:
    """Read a file of the project."""
    return (PROJECT / file).read_text()


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Read which mutants are no different from the original, and why."""
    listed = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {(one["file"], one["function"], one["line"], one["mutated"]): one["why"] for one in listed}


def copied(tree: Path) -> None:
    """Copy the tree as it is now, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, tree / name)
    # A changed source of the same size and second must not be taken for what was compiled before.
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "cdpsim"]
    subprocess.run(command, cwd=tree, check=True)


def batches(tests: list[str]) -> list[list[str]]:
    """Split tests: first those of three files, because it takes long to import all."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))[:3]
    near = [test for test in tests if test.partition("::")[0] in files]
    return [near, [test for test in tests if test not in set(near)]]


def verdict(tree: Path, mutant: Mutant, tests: list[str]) -> str | None:
    """Run the tests of a mutant; give the test that kills it."""
    place = tree / mutant.file
    place.write_text(mutant.apply(place.read_text()))
    try:
        return next((killer for batch in batches(tests) if batch and (killer := failing(tree, batch))), None)
    finally:
        shutil.copy2(PROJECT / mutant.file, place)


def hunt(tree: Path, every: list[Mutant]) -> tuple[list[Mutant], list[str]]:
    """Run mutants and say what becomes of each; give those that survive, and the tests that killed the others."""
    covering, left, killers = Covering(KEPT), [], []
    for count, mutant in enumerate(every, 1):
        tests = covering.tests(mutant.file, mutant.lines)
        killer = verdict(tree, mutant, tests)
        said = f"killed by {killer}" if killer else f"survives {len(tests)} tests"
        print(f"{count:3} {mutant.file}:{mutant.line} in {mutant.function or 'the module'}: {said}", flush=True)
        if killer:
            killers.append(killer)
        else:
            left.append(mutant)
            print("    - {}\n    + {}".format(*name_of(mutant)[2:]), flush=True)
    return left, killers


def hunted(every: list[Mutant]) -> tuple[list[Mutant], list[str]]:
    """Hunt in a copy of the tree. Without a mutation all test files are imported there, and what kills passes."""
    import_what_tests_need()
    of_each_file = {test.partition("::")[0]: test for test in Covering(KEPT).seconds}
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        left, killers = hunt(Path(folder), every)
        wrong = failing(Path(folder), sorted({*of_each_file.values(), *killers} - {"import"}))
    if wrong is not None:
        print(f"{wrong} fails without a mutation, too: repair it first", file=sys.stderr)
        sys.exit(2)
    return left, killers


def main() -> int:
    """Draw mutants, run those that differ, and count those that are killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("seed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--at", default="", help="cdpsim/FILE.py:FUNCTION, or the beginning of it: mutants of these")
    asked = parser.parse_args()
    measure(KEPT)
    every = drawn(asked.seed, asked.count, asked.at)
    same = equivalents()
    different = [mutant for mutant in every if name_of(mutant) not in same]
    for mutant in every:
        if name_of(mutant) in same:
            print(f"    {mutant.file}:{mutant.line} in {mutant.function}: equivalent, {same[name_of(mutant)]}")
    left, killers = hunted(different)
    share = len(killers) / len(different) if different else 1
    print(f"seed {asked.seed}: {len(killers)} of {len(different)} mutants are killed, {share:.1%}", end="; ")
    print(f"{len(left)} survive, {len(every) - len(different)} are equivalent")
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
