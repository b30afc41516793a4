"""The house rules of DESIGN.md: layers, lazy imports, docstrings, and what engines must not know."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from cdpsim import SCHEDULES
from cdpsim.schedules.rule import RULES

PROJECT = Path(__file__).parent.parent
# A module imports only from its own room and from rooms above it.
ROOMS = [
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
    "front",
    "studies",
    "draw",
    "export",
    "cli",
    "__init__",
    "__main__",
]
# Packages that take long to import. The modules in LATE import them, and are imported late themselves.
HEAVY = {"torch", "matplotlib", "networkx", "numba", "pandas", "perfetto"}
# The modules of draw/ that exports, commands and doctests need, which draw nothing themselves.
LIGHT = {"draw", "draw.canvas", "draw.html", "draw.look", "draw.palette", "draw.plots", "draw.text", "draw.views"}


def name_of(path: Path) -> str:
    """A module's name without the package's: `schedules.rule`; the package itself is `__init__`."""
    parts = path.relative_to(PROJECT / "cdpsim").with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


MODULES = {name_of(path): ast.parse(path.read_text()) for path in sorted((PROJECT / "cdpsim").rglob("*.py"))}

LATE = {"numeric.compiled": {"numba"}} | {
    name: {"matplotlib"} for name in MODULES if name.startswith("draw.") and name not in LIGHT
}


# The modules that import late from rooms below them: their objects draw themselves in notebooks.
SHOWN = {"trace": {"draw.html", "draw.plots"}, "studies.table1": {"studies.table1_forms"}}


def module_named(dotted: str) -> str:
    """The module that a dotted name leads to: `cdpsim.errors.suggestion` to `errors`."""
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
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


OWN = {
    name: {module_named(dotted) for dotted in imports(tree) if dotted.split(".")[0] == "cdpsim"}
    - {name}
    - SHOWN.get(name, set())
    for name, tree in MODULES.items()
}  # what each module imports of the package


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in MODULES} == set(ROOMS), "give a new room its place in ROOMS, here and in DESIGN.md"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_its_room_and_those_above(name: str) -> None:
    rooms = {room(imported) for imported in OWN[name]}
    assert rooms <= set(ROOMS[: ROOMS.index(room(name)) + 1]), sorted(rooms)


def test_only_what_is_called_late_imports_from_rooms_below() -> None:
    for name, shown in SHOWN.items():
        now = {module_named(dotted) for dotted in imported_with(MODULES[name])}
        assert shown <= {module_named(dotted) for dotted in imports(MODULES[name])} and not shown & now


def test_no_modules_import_each_other() -> None:
    """Not in a room, either; a package's modules may import the package itself."""
    packages = {name for name in MODULES if any(other.startswith(f"{name}.") for other in MODULES)}
    above = {
        name: {other for other in own if other not in packages or not name.startswith(f"{other}.")}
        for name, own in OWN.items()
    }
    assert list(TopologicalSorter(above).static_order())


# The harness: packages, each of which imports only from itself and those before it.
HARNESS = (
    "modules",
    "program",
    "training",
    "profile",
    "replay",
    "ranks",
    "report",
    "learn",
    "calibrate",
    "comparison",
    "peers",
    "published",
    "hugging_face",
    "__main__",
)
HARNESS_FILES = sorted((PROJECT / "validation").rglob("*.py"))


@pytest.mark.parametrize("path", HARNESS_FILES, ids=lambda path: str(path.relative_to(PROJECT / "validation")))
def test_the_harness_imports_only_from_packages_above(path: Path) -> None:
    """And from itself without its name, which is another one where it is installed."""
    within = path.relative_to(PROJECT / "validation").with_suffix("").parts
    package = ".".join(("harness", *within[:-1]))
    dotted = [name.split(".") for name in imports(ast.parse(path.read_text()), package)]
    assert not {names[0] for names in dotted} & {"validation", "cdpsim_validation"}
    used = {names[1] for names in dotted if names[0] == "harness" and names[1] in HARNESS}
    assert used <= set(HARNESS[: HARNESS.index(within[0]) + 1]) if within[0] != "__init__" else not used


def test_the_package_knows_nothing_of_the_harness() -> None:
    assert not {dotted for tree in MODULES.values() for dotted in imports(tree) if dotted.startswith("validation")}


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


def test_nothing_is_imported_from_a_test() -> None:
    """Helpers have modules of their own, in `tests/helpers` and `tests/validation`."""
    imported = {path: imported_tests(ast.parse(path.read_text())) for path in TESTS.rglob("*.py")}
    assert not [f"{path.relative_to(TESTS)}: {names}" for path, names in imported.items() if names]


@pytest.mark.parametrize("name", MODULES)
def test_what_takes_long_to_import_waits_until_it_is_needed(name: str) -> None:
    now = {dotted.split(".")[0] for dotted in imported_with(MODULES[name])}
    assert now & HEAVY <= LATE.get(name, set())
    own = {module_named(dotted) for dotted in imported_with(MODULES[name]) if dotted.split(".")[0] == "cdpsim"}
    assert not {imported for imported in own & set(LATE) if room(imported) != room(name) or name in LIGHT}


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


@pytest.mark.parametrize("module", MODULES)
def test_what_is_public_says_what_it_is_in_a_sentence(module: str) -> None:
    """The module, and all of its public classes, functions and methods."""
    for name, node in documented(MODULES[module], module):
        docstring = ast.get_docstring(node)
        assert docstring, f"{name} has no docstring"
        first, *rest = docstring.splitlines()
        assert first.endswith("."), f"{name}: {first}"
        assert len(first.split()) > 1, f"{name}: {first}"
        assert not rest or not rest[0], f"{name}: a blank line comes after {first!r}"


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


LONGEST_FUNCTION = 40  # lines


def test_functions_are_short() -> None:
    """From `def` to the last line, docstring included."""
    functions = [
        (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in MODULES.items()
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


DERIVED = [name for name in MODULES if name.startswith(("program.", "timing.", "trace.metrics"))]
ENGINES = [name for name in MODULES if name.startswith("timing.engine")]


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_derived_knows_no_schedule_by_its_name(name: str) -> None:
    known = SCHEDULES.keys() - RULES.keys()  # a rule, dp, is of the same name as a schedule
    named = [text for text in texts(MODULES[name]) if any(schedule in text for schedule in known)]
    assert not named


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_knows_no_schedule_and_no_slot(name: str) -> None:
    """Times come out of dependencies, lane orders and costs alone."""
    imported = {module_named(dotted) for dotted in imports(MODULES[name])}
    assert not [each for each in imported if each.startswith(("schedules", "program.assembly", "front", "studies"))]
    assert not [word for word in words(MODULES[name]) if "slot" in word or "position" in word]


def test_the_scans_find_what_they_look_for() -> None:
    """Each scan is held against a text that breaks its rule."""
    tree = ast.parse('"""multi-dp."""\nimport numba\ndef f(slot):\n    import torch\n    return f"{slot} of mp-cdp"\n')
    assert list(imported_with(tree)) == ["numba"]
    assert list(imports(tree)) == ["numba", "torch"]
    assert list(imports(ast.parse("from ..b import c\nfrom . import d"), "x.a")) == ["x.b.c", "x.a.d"]
    assert [text for text in texts(tree) if "-" in text] == [" of mp-cdp"]
    assert "slot" in list(words(tree))
    assert [name for name, _ in documented(tree, "x")] == ["x", "x.f"]
    assert module_named("cdpsim.schedules.rule.RULES") == "schedules.rule"
    assert module_named("cdpsim.front.simulate") == "front"
    assert module_named("cdpsim") == "__init__"
    tree = ast.parse("from tests import conftest\nfrom tests.cli.test_cli import here\nimport tests.test_front")
    assert imported_tests(tree) == ["tests.cli.test_cli.here", "tests.test_front"]
