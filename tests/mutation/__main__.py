"""Mutation: does a test fail where a line is wrong?  python -m tests.mutation SEED [--count 100] [--quick].

Mutants of the core and of `validation/learn`, which needs torch, are drawn by the seed alone, and made in a copy of the
tree. Each meets the tests that cover its lines, the cheapest that together took a minute, until one fails. It is killed
where a test fails, cannot be imported, or does not end in two minutes; it survives where all pass. Mutants that no test
can tell from the original are listed in `equivalent.toml`, with a reason each. The exit code is 1 where fewer than 95 %
of the others are killed. With --quick a mutant first meets the cheapest of those tests that pytest alone would draw by
the seed, and what these kill is counted, too.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Container, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.mutation.covering import (
    CORE,
    EVERY_CASE,
    LEARN,
    PROJECT,
    Covering,
    drawn_tests,
    failing,
    files_with_tests,
    import_what_tests_need,
    measure,
)
from tests.mutation.mutants import Mutant, mutants

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
KEPT = PROJECT / "build" / "mutation"
# Modules that read requests, write files, draw or print stay as they are.
SHELL = "__init__ __main__ cli draw errors experiment export files limits presets request setting version"
SHELL += " command figure"  # of validation/learn
ENOUGH = 0.95  # of those that differ


class Suite(NamedTuple):
    """Tests that a mutant meets, and the options by which pytest runs them."""

    tests: Container[str]
    options: list[str]


class Fate(NamedTuple):
    """The outcome of a mutant: the test that killed it, if one did, and the turn of its suite."""

    mutant: Mutant
    killer: str | None
    turn: int


def packages() -> list[str]:
    """List what is mutated here."""
    return [CORE, LEARN] if find_spec("torch") else [CORE]


def mutated_files(package: str) -> Iterator[str]:
    """List the files of a package that are mutated, relative to the project."""
    for path in sorted((PROJECT / package).rglob("*.py")):
        if path.relative_to(PROJECT / package).parts[0].removesuffix(".py") not in SHELL.split():
            yield str(path.relative_to(PROJECT))


def drawn(seed: str, count: int, at: str) -> list[Mutant]:
    """Draw mutants by a seed, of all files whose `file:function` begins like this.

    Each has a number of its own, by the seed and its name: what is drawn stays the same where code changes elsewhere.
    """
    files = [file for package in packages() for file in mutated_files(package)]
    every = [one for file in files for one in mutants(file, source(file))]
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
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "cdpsim", LEARN]
    subprocess.run(command, cwd=tree, check=True)
    (tree / "cdpsim_validation").symlink_to("validation")  # its name in an installation


def batches(tests: list[str]) -> list[list[str]]:
    """Split tests: first those of three files, because it takes long to import all."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))[:3]
    near = [test for test in tests if test.partition("::")[0] in files]
    return [near, [test for test in tests if test not in set(near)]]


def fate(tree: Path, mutant: Mutant, suites: list[Suite], covering: Covering) -> Fate:
    """Run the tests of a mutant, one suite after another."""
    place = tree / mutant.file
    place.write_text(mutant.apply(place.read_text()))
    try:
        for turn, suite in enumerate(suites):
            for batch in batches(covering.tests(mutant.file, mutant.lines, suite.tests)):
                if batch and (killer := failing(tree, batch, suite.options)):
                    return Fate(mutant, killer, turn)
        return Fate(mutant, None, len(suites))
    finally:
        shutil.copy2(PROJECT / mutant.file, place)


def hunt(tree: Path, every: list[Mutant], suites: list[Suite], covering: Covering) -> Iterator[Fate]:
    """Run mutants, and say what becomes of each."""
    for count, mutant in enumerate(every, 1):
        found = fate(tree, mutant, suites, covering)
        said = f"killed by {found.killer}" if found.killer else "survives"
        if found.killer and len(suites) > 1:
            said += ", which is drawn" if found.turn == 0 else ", by none that is drawn"
        print(f"{count:3} {mutant.file}:{mutant.line} in {mutant.function or 'the module'}: {said}", flush=True)
        if found.turn > 0:
            print("    - {}\n    + {}".format(*name_of(mutant)[2:]), flush=True)
        yield found


def hunted(every: list[Mutant], suites: list[Suite], covering: Covering) -> list[Fate]:
    """Hunt in a copy of the tree. Without a mutation all test files are imported there, and what kills passes."""
    of_each_file = {test.partition("::")[0]: test for test in covering.seconds}
    import_what_tests_need(of_each_file)
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        found = list(hunt(Path(folder), every, suites, covering))
        killers = {one.killer for one in found if one.killer} - {"import"}
        wrong = failing(Path(folder), sorted({*of_each_file.values(), *killers}), EVERY_CASE)
    if wrong is not None:
        print(f"{wrong} fails without a mutation, too: repair it first", file=sys.stderr)
        sys.exit(2)
    return found


def main() -> int:
    """Draw mutants, run those that differ, and count those that are killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("seed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--at", default="", help="PATH/FILE.py:FUNCTION, or the beginning of it: mutants of these")
    parser.add_argument("--tests", default="", help="tests/ROOM/FILE.py, or the beginning of it: tests of these alone")
    parser.add_argument("--quick", action="store_true", help="first try the tests that pytest alone draws by the seed")
    asked = parser.parse_args()
    every = drawn(asked.seed, asked.count, asked.at)
    same = equivalents()
    different = [mutant for mutant in every if name_of(mutant) not in same]
    for mutant in every:
        if name_of(mutant) in same:
            print(f"    {mutant.file}:{mutant.line} in {mutant.function}: equivalent, {same[name_of(mutant)]}")
    mutated = [package for package in packages() if any(one.file.startswith(f"{package}/") for one in different)]
    files = [file for package in mutated for file in files_with_tests(package) if file.startswith(asked.tests)]
    if not files:
        parser.error(f"no mutant of {asked.at or 'all'} has tests in {asked.tests or 'tests'}")
    files = measure(KEPT, files)
    covering = Covering(KEPT, files)
    suites = [Suite(covering.seconds, EVERY_CASE)]
    if asked.quick:
        suites.insert(0, Suite(drawn_tests(files, asked.seed), [f"--draw={asked.seed}"]))
    found = hunted(different, suites, covering)
    killed = sum(one.killer is not None for one in found)
    print(f"seed {asked.seed}: {said(killed, found)} are killed; ", end="")
    if asked.quick:
        print(f"{said(sum(one.turn == 0 for one in found), found)} by tests that are drawn; ", end="")
    print(f"{len(found) - killed} survive, {len(every) - len(found)} are equivalent")
    return int(killed < ENOUGH * len(found))


def said(killed: int, found: list[Fate]) -> str:
    """Say how many mutants of all were killed."""
    return f"{killed} of {len(found)} mutants, {killed / max(len(found), 1):.1%},"


if __name__ == "__main__":
    sys.exit(main())
