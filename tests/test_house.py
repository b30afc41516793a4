"""The house rules of DESIGN.md: layers, lazy imports, docstrings, and what engines must not know."""

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from cdpsim import SCHEDULES
from cdpsim.schedules.rule import RULES
from tests.way import functions_called

PROJECT = Path(__file__).parent.parent
# A module imports only from its own room and from rooms above it.
ROOMS = [
    "interrupts",
    "version",
    "errors",
    "files",
    "numeric",
    "cluster",
    "model",
    "presets",
    "schedules",
    "program",
    "timing",
    "trace",
    "limits",
    "request",
    "runs",
    "invariants",
    "api",
    "studies",
    "draw",
    "export",
    "cli",
    "__init__",
    "__main__",
]
# The lines of Python that a room may have: a commit that needs more changes the number, and its message says why.
LINES = {
    "files": 1139,
    "numeric": 1135,
    "cluster": 1648,
    "model": 3228,
    "presets": 65,
    "schedules": 2612,
    "program": 5468,
    "timing": 2378,
    "trace": 1866,
    "request": 2341,
    "invariants": 2599,
    "runs": 2072,
    "api": 190,
    "studies": 5721,
    "draw": 4490,
    "export": 897,
    "cli": 1836,
}
MOST_FILES = 144  # of Python
# How many functions of how many modules the simplest request calls, in Python and through the command line.
WAY, WAY_OF_A_COMMAND = (498, 44), (655, 63)
# Packages that take long to import. The modules of late() import them, and are imported late themselves.
HEAVY = {"torch", "matplotlib", "networkx", "numba", "pandas", "perfetto"}
# The modules of draw/ that exports, commands and doctests need, which draw nothing themselves.
LIGHT = {"draw", "draw.canvas", "draw.palette", "draw.plots", "draw.text", "draw.views"}


@pytest.fixture(scope="module", autouse=True)
def _trees_are_no_garbage() -> Iterator[None]:
    """Keep the collector from reading all trees time and again, which takes as long as the tests."""
    gc.disable()
    yield
    for kept in (modules, own_imports):
        kept.cache_clear()
    gc.enable()


def name_of(path: Path) -> str:
    """A module's name without the package's: `schedules.rule`; the package itself is `__init__`."""
    parts = path.relative_to(PROJECT / "cdpsim").with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


@cache
def modules() -> dict[str, ast.Module]:
    """The package's modules by their names, parsed when a test asks first."""
    return {name_of(path): ast.parse(path.read_text()) for path in sorted((PROJECT / "cdpsim").rglob("*.py"))}


def modules_in(*beginnings: str) -> dict[str, ast.Module]:
    """Those whose names begin so, of which there are some."""
    found = {name: tree for name, tree in modules().items() if name.startswith(beginnings)}
    assert found
    return found


def late() -> dict[str, set[str]]:
    """The modules that import packages of HEAVY, and which."""
    drawing = modules_in("draw.").keys() - LIGHT
    return {"numeric.compiled": {"numba"}} | {name: {"matplotlib"} for name in drawing}


# The modules that import late from rooms below them: their objects draw themselves in notebooks.
SHOWN = {"trace": {"draw.text", "draw.plots"}}


def module_named(dotted: str) -> str:
    """The module that a dotted name leads to: `cdpsim.errors.suggestion` to `errors`."""
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in modules():
        parts.pop()
    return ".".join(parts) or "__init__"


def imports(tree: ast.AST, package: str | None = None) -> Iterator[str]:
    """Dotted names of all that is imported, also inside functions; of relative imports where the package is given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert package or not node.level, "import from cdpsim by its name"
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_with(tree: ast.Module) -> Iterator[str]:
    """List the modules that importing a module imports, without those that functions or only type checkers import."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        waiting += ast.iter_child_nodes(node)


def room(name: str) -> str:
    """The room that a module is in."""
    return name.partition(".")[0]


def of_the_package(dotted: Iterable[str]) -> set[str]:
    """The modules of the package that dotted names lead to."""
    return {module_named(name) for name in dotted if name.split(".")[0] == "cdpsim"}


@cache
def own_imports() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, without those in SHOWN."""
    return {name: of_the_package(imports(tree)) - {name} - SHOWN.get(name, set()) for name, tree in modules().items()}


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in modules()} == set(ROOMS), "give a new room its place in ROOMS, here and in DESIGN.md"


def test_modules_import_only_from_their_rooms_and_those_above() -> None:
    below = [
        f"{name} imports {other}"
        for name, others in own_imports().items()
        for other in others
        if ROOMS.index(room(other)) > ROOMS.index(room(name))
    ]
    assert not below


def test_only_what_is_called_late_imports_from_rooms_below() -> None:
    for name, shown in SHOWN.items():
        assert shown <= of_the_package(imports(modules()[name]))
        assert not shown & of_the_package(imported_with(modules()[name]))


def test_no_modules_import_each_other() -> None:
    """Not in a room, either; a package's modules may import the package itself."""
    packages = {name for name in modules() if any(other.startswith(f"{name}.") for other in modules())}
    above = {
        name: {other for other in own if other not in packages or not name.startswith(f"{other}.")}
        for name, own in own_imports().items()
    }
    assert list(TopologicalSorter(above).static_order())


# The harness: packages, each of which imports only from itself and those before it.
HARNESS = (
    "program",
    "training",
    "report",
    "profile",
    "replay",
    "ranks",
    "learn",
    "calibrate",
    "comparison",
    "peers",
    "__main__",
)


def wrong_in_the_harness(within: tuple[str, ...], tree: ast.AST) -> list[str]:
    """What a module of the harness may not import: from itself by its name, or from a package below its own."""
    height = -1 if within[0] == "__init__" else HARNESS.index(within[0])
    wrong = []
    for dotted in imports(tree, ".".join(("harness", *within[:-1]))):
        first, second, *_ = *dotted.split("."), ""
        below = first == "harness" and second in HARNESS[height + 1 :]
        wrong += [dotted] * (below or first in ("validation", "cdpsim_validation"))
    return wrong


def test_the_harness_imports_only_from_packages_above() -> None:
    """And from itself without its name, which is another one where it is installed."""
    harness = PROJECT / "validation"
    files = {path.relative_to(harness).with_suffix(""): path for path in harness.rglob("*.py")}
    assert {path.parts[0] for path in files} == {"__init__", *HARNESS}
    wrong = {path: wrong_in_the_harness(path.parts, ast.parse(files[path].read_text())) for path in files}
    assert not [f"validation/{path}.py: {names}" for path, names in wrong.items() if names]


def test_learning_stands_alone() -> None:
    """It needs FLOP of layers, one thread, and the figures of reports alone; only the command line imports it."""
    harness, rooms = PROJECT / "validation", {}
    for path in harness.rglob("*.py"):
        parts = path.relative_to(harness).parts
        dotted = [name.split(".") for name in imports(ast.parse(path.read_text()), ".".join(("harness", *parts[:-1])))]
        rooms[parts] = {name[1] for name in dotted if name[0] == "harness" and len(name) > 1}
    used = {room for parts, others in rooms.items() if parts[0] == "learn" for room in others}
    assert used == {"learn", "install_command", "profile", "program", "report", "training"}
    assert [parts for parts, others in rooms.items() if parts[0] != "learn" and "learn" in others] == [("__main__.py",)]


def test_the_package_knows_nothing_of_the_harness() -> None:
    assert not {dotted for tree in modules().values() for dotted in imports(tree) if dotted.startswith("validation")}


def test_design_shows_the_rooms_in_this_order() -> None:
    """DESIGN.md lists every room once, at its height, and no other."""
    drawing = re.search(r"\n## Rooms\n.*?\n((?:    [^\n]*\n|\n)+)", (PROJECT / "DESIGN.md").read_text(), re.DOTALL)
    assert drawing is not None
    beginnings = [re.match(r"    ((?:[a-z0-9_]+(?:\.py|/) ?)+)", line) for line in drawing[1].splitlines()]
    shown = [re.sub(r"\.py|/", "", word) for words in beginnings if words for word in words[1].split()]
    assert len(shown) > 15
    assert shown == [name for name in ROOMS if not name.startswith("__")]


TESTS = PROJECT / "tests"
# Folders of tests that are no room's: of several rooms together, of the harness, and of the tests themselves.
NO_ROOM = {"across_rooms", "validation", "mutation"}


def test_folders_of_tests_mirror_the_rooms() -> None:
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py") if path.parent != TESTS}
    packages = {name for name in ROOMS if (PROJECT / "cdpsim" / name / "__init__.py").exists()}
    assert folders == packages | NO_ROOM, "see tests/README.md"


def imported_tests(tree: ast.AST) -> list[str]:
    """Dotted names of the test modules that a module imports."""
    return [dotted for dotted in imports(tree) if re.match(r"tests\.(\w+\.)*test_", dotted)]


IMPORTING_A_TEST = r"^ *(?:from|import) (?:[^\n(]*\btest_|[^\n]*\([^)]*\btest_)"


def modules_of_tests(pattern: str) -> dict[str, ast.Module]:
    """The modules of the tests, by their files, whose text has a pattern: to parse all of them takes seconds."""
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    found = {path: text for path, text in texts.items() if re.search(pattern, text, re.MULTILINE)}
    return {str(path.relative_to(TESTS)): ast.parse(text) for path, text in found.items()}


def test_nothing_is_imported_from_a_test() -> None:
    """Helpers have modules of their own, in `tests/helpers` and `tests/validation`."""
    imported = {path: imported_tests(tree) for path, tree in modules_of_tests(IMPORTING_A_TEST).items()}
    assert not {path: names for path, names in imported.items() if names}


def has_examples(tree: ast.AST) -> bool:
    """Whether a docstring has an example, which only those of the package and of pages run."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return any(">>> " in (ast.get_docstring(node) or "") for node in ast.walk(tree) if isinstance(node, documented))


def test_docstrings_of_tests_have_no_examples() -> None:
    """Nothing would run them."""
    assert not [path for path, tree in modules_of_tests(">>> ").items() if has_examples(tree)]


def imported_too_early(name: str, tree: ast.Module) -> list[str]:
    """What of HEAVY, or of the modules of late(), a module imports as soon as it is imported itself."""
    now = list(imported_with(tree))
    heavy = HEAVY & {dotted.split(".")[0] for dotted in now} - late().get(name, set())
    own = of_the_package(now) & late().keys()
    return sorted(heavy | {other for other in own if room(other) != room(name) or name in LIGHT})


def test_what_takes_long_to_import_waits_until_it_is_needed() -> None:
    early = {name: imported_too_early(name, tree) for name, tree in modules().items()}
    assert not {name: imported for name, imported in early.items() if imported}


@pytest.mark.parametrize("module", ["cdpsim", "cdpsim.cli"])
def test_importing_the_package_imports_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({HEAVY | {'tqdm', 'simpy', 'quantiphy'}!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_small_requests_import_no_numba() -> None:
    """It takes longer to load than they take."""
    program = """
import sys, cdpsim
from cdpsim.studies.compare import measure
cdpsim.table1(4)
measure(cdpsim.simulate("1f1b", 8, m=16, model="gpt2", cluster="a100-nodes")).step
cdpsim.simulate("1f1b", 64, m=128).summary()
print("numba" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def documented(tree: ast.Module, name: str) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """The module and its public classes, functions and methods."""
    waiting: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]] = [(name, tree)]
    while waiting:
        name, node = waiting.pop()
        yield name, node
        inner = [] if isinstance(node, ast.FunctionDef) else node.body
        for child in inner:
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                waiting.append((f"{name}.{child.name}", child))


def is_a_sentence(docstring: str | None) -> bool:
    """Whether a docstring begins with words that end in a full stop, and a blank line comes after them."""
    first, *rest = (docstring or "-").splitlines()
    return first.endswith(".") and len(first.split()) > 1 and not (rest and rest[0])


def test_what_is_public_says_what_it_is_in_a_sentence() -> None:
    """All modules, and their public classes, functions and methods."""
    every = [each for name, tree in modules().items() for each in documented(tree, name)]
    assert not [name for name, node in every if not is_a_sentence(ast.get_docstring(node))]


def top_level_names(tree: ast.Module) -> set[str]:
    """Names that a module defines: functions, classes, constants and types."""
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in defined if not name.startswith("__")}


@pytest.mark.parametrize("package", ["cdpsim", "validation"])
def test_no_top_level_name_has_two_meanings(package: str) -> None:
    """A name that two modules define would need its module to be understood, private names included."""
    modules: dict[str, list[str]] = {}
    for path in sorted((PROJECT / package).rglob("*.py")):
        for name in top_level_names(ast.parse(path.read_text())):
            modules.setdefault(name, []).append(str(path.relative_to(PROJECT)))
    assert not {name: paths for name, paths in modules.items() if len(paths) > 1}


def test_a_file_name_says_which_file_is_meant() -> None:
    """Two modules of one name would need their folders to be told apart."""
    names = Counter(path.name for path in (PROJECT / "cdpsim").rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


LONGEST_FUNCTION = 40  # lines


def test_functions_are_short() -> None:
    """From `def` to the last line, docstring included."""
    functions = [
        (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    assert len(functions) > 1000
    assert not [function for function in functions if function[0] > LONGEST_FUNCTION]


def texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a module but its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def words(tree: ast.AST) -> Iterator[str]:
    """All names that a module gives or uses."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word


def named_schedules(tree: ast.AST) -> list[str]:
    """The texts of a module that have a schedule's name."""
    known = SCHEDULES.keys() - RULES.keys()  # a rule, dp, is of the same name as a schedule
    return [text for text in texts(tree) if any(schedule in text for schedule in known)]


def test_what_is_derived_knows_no_schedule_by_its_name() -> None:
    derived = modules_in("program.", "timing.", "trace.metrics")
    named = {name: named_schedules(tree) for name, tree in derived.items()}
    assert not {name: found for name, found in named.items() if found}


def known_of_order(tree: ast.AST) -> list[str]:
    """What a module imports, or names, of the order in which devices work."""
    rooms = "schedules", "program.assembly", "runs", "api", "studies"
    imported = [name for name in of_the_package(imports(tree)) if name.startswith(rooms)]
    return imported + [word for word in words(tree) if "slot" in word or "position" in word]


def test_engines_know_no_schedule_and_no_slot() -> None:
    """Times come out of dependencies, lane orders and costs alone."""
    known = {name: known_of_order(tree) for name, tree in modules_in("timing.engine").items()}
    assert not {name: found for name, found in known.items() if found}


# Rates by which sizes are divided to make seconds, and functions of `timing` that price single messages.
RATES = {"bandwidth", "bandwidths", "memory_bandwidth", "memory_bandwidths", "speed", "speeds", "reached", "peak_flops"}
PRICING = {"fastest_algorithm", "fastest_in_group", "message_durations", "collective_on_links"}
# Rooms that may know what seconds are made of: `cluster` finds the latency of a route, and laws recount on purpose.
PRICED_IN = ("timing", "cluster", "invariants")


def made_by(node: ast.AST) -> bool:
    """Whether an expression or a statement makes seconds.

    It divides by a rate, adds a latency, makes costs or writes a duration into some, sweeps the levels of a program, or
    imports a price of messages.
    """
    if isinstance(node, ast.BinOp | ast.AugAssign):
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        divides = isinstance(node.op, ast.Div | ast.FloorDiv) and not RATES.isdisjoint(words(right))
        adds = isinstance(node.op, ast.Add | ast.Sub) and "latency" in {*words(left), *words(right)}
        return divides or adds
    if isinstance(node, ast.Assign):
        rows = [each.value for each in node.targets if isinstance(each, ast.Subscript)]
        return any(isinstance(each, ast.Attribute) and each.attr == "duration" for each in rows)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "Costs"
    if isinstance(node, ast.Attribute):
        return node.attr == "levels"
    return isinstance(node, ast.ImportFrom) and not PRICING.isdisjoint(alias.name for alias in node.names)


def seconds_made(tree: ast.AST) -> list[str]:
    """Where a module makes seconds."""
    return [ast.unparse(node) for node in ast.walk(tree) if made_by(node)]


def test_seconds_are_made_in_one_room() -> None:
    """The map of who makes which time is the docstring of `timing.costs`; it names the room's modules."""
    made = {name: seconds_made(tree) for name, tree in modules().items() if room(name) not in PRICED_IN}
    assert {name: found for name, found in made.items() if found} == {}
    shown = re.findall(r"^(\w+)  ", ast.get_docstring(modules()["timing.costs"]) or "", re.MULTILINE)
    within = {name.split(".")[1] for name in modules_in("timing.")}
    assert within == {*shown}


def test_the_scans_find_what_they_look_for() -> None:
    """Each scan is held against a text that breaks its rule."""
    tree = ast.parse('"""multi-dp."""\nimport numba\ndef f(slot):\n    import torch\n    return f"{slot} of mp-cdp"\n')
    assert list(imported_with(tree)) == ["numba"]
    assert list(imports(tree)) == ["numba", "torch"]
    assert list(imports(ast.parse("from ..b import c\nfrom . import d"), "x.a")) == ["x.b.c", "x.a.d"]
    assert imported_too_early("x", tree) == ["numba"]
    assert imported_too_early("api", ast.parse("from cdpsim.draw.gantt import gantt")) == ["draw.gantt"]
    assert named_schedules(tree) == [" of mp-cdp"]
    assert known_of_order(tree) == ["slot", "slot"]
    assert known_of_order(ast.parse("from cdpsim.schedules import order")) == ["schedules.order"]
    makers = [
        "size / link.bandwidth",
        "times[work] /= speed",
        "host.latency + moved",
        "Costs(duration)",
        "costs.duration[nodes] = pieces",
        "graph = program.levels",
        "from cdpsim.timing.collective_times import message_durations",
    ]
    assert [len(seconds_made(ast.parse(text))) for text in makers] == [1] * len(makers)
    assert seconds_made(ast.parse("factor * link.bandwidth\nduration[rows] = 1\nreached(cluster, 1)[0]")) == []
    assert [name for name, _ in documented(tree, "x")] == ["x", "x.f"]
    assert [is_a_sentence(text) for text in (None, "Run it", "Run.", "Run it.\nNow.", "Run it.\n\nNow.")] == [
        0,
        0,
        0,
        0,
        1,
    ]
    assert module_named("cdpsim.schedules.rule.RULES") == "schedules.rule"
    assert module_named("cdpsim.api.simulate") == "api"
    assert module_named("cdpsim") == "__init__"
    text = "from tests import conftest\nfrom tests.cli.test_cli import here\nimport tests.test_api"
    each = [
        *text.splitlines(),
        "from tests.cli import (\n    test_cli,\n)",
        "from tests import conftest\ndef test_a(): ...",
    ]
    assert [bool(re.search(IMPORTING_A_TEST, one, re.MULTILINE)) for one in each] == [False, True, True, True, False]
    tree = ast.parse(text)
    assert imported_tests(tree) == ["tests.cli.test_cli.here", "tests.test_api"]
    assert has_examples(ast.parse('def f():\n    """Add.\n\n    >>> 1 + 1\n    3\n    """'))
    tree = ast.parse("from .learn import page\nfrom .replay import case\nimport validation.program")
    assert wrong_in_the_harness(("ranks", "x"), tree) == ["validation.program"]
    tree = ast.parse("from ..learn import page\nfrom ..replay import case")
    assert wrong_in_the_harness(("ranks", "x"), tree) == ["harness.learn.page"]


def test_each_room_keeps_to_its_budget() -> None:
    lines: dict[str, int] = {}
    for path in (PROJECT / "cdpsim").rglob("*.py"):
        where = room(name_of(path))
        lines[where] = lines.get(where, 0) + len(path.read_text(encoding="utf-8").splitlines())
    assert {where: lines[where] for where, most in LINES.items() if lines[where] > most} == {}
    assert len([*(PROJECT / "cdpsim").rglob("*.py")]) <= MOST_FILES


@pytest.mark.parametrize(("command", "most"), [(False, WAY), (True, WAY_OF_A_COMMAND)], ids=["python", "command"])
def test_the_simplest_request_goes_a_short_way(command: bool, most: tuple[int, int]) -> None:
    """Another number of functions means that a reader has another way to go: `python -m tests.way` lists it."""
    called = functions_called(command=command)
    assert len(called) <= most[0]
    assert len({module for module, _ in called}) <= most[1]
    assert ("timing.engine", "find_engine") in called
