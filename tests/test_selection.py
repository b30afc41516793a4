"""Which tests run: what is refused, which cases are chosen, what a draw decides, and how many examples laws have."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES
from cdpsim.version import __version__
from tests import selection
from tests.selection import COUNTED, Examples, commit, kind_in, kind_of

PROJECT = Path(__file__).parent.parent
USUAL = {"cases": "4", "slow": False, "draw": "word", "shuffle": False, "ci": False, "share": 1.0, "markexpr": ""}


def config(*args: str, **options: Any) -> Any:
    """Make a configuration of pytest: the arguments and options of a command line, where it says something else."""
    stash = pytest.Stash()
    stash[COUNTED] = {"all": 0, "chosen": 0}
    markers = ["long: takes minutes", "slow: takes a second", "timeout(seconds): of a plugin"]
    option = SimpleNamespace(**USUAL | options)
    return SimpleNamespace(option=option, args=args, stash=stash, rootpath=PROJECT, getini=lambda name: markers)


# Bad values.

REFUSED = [
    ({"cases": "0"}, "--cases: '0' is no number from 1 on; give one, or all"),
    ({"cases": "few"}, "--cases: 'few' is no number from 1 on; give one, or all"),
    ({"draw": "a/b"}, "--draw: 'a/b' is no word; give letters and digits"),
    ({"draw": ""}, "--draw: '' is no word; give letters and digits"),
    ({"share": 2.0}, "--share: 2 is not above 0 and at most 1"),
    ({"share": 0.0}, "--share: 0 is not above 0 and at most 1"),
    ({"markexpr": "nonsense"}, "-m: 'nonsense' is no marker; one of long, slow, timeout"),
    ({"markexpr": "not (long or nonsense)"}, "-m: 'nonsense' is no marker; one of long, slow, timeout"),
]


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_a_bad_value_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(pytest.UsageError) as refusal:
        selection.pytest_configure(config(**options))
    assert str(refusal.value) == line


@pytest.mark.parametrize("options", [{"cases": "all"}, {"markexpr": "long or not(slow and not timeout(seconds=1))"}])
def test_a_good_value_is_not(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "long_run", {})
    chosen = config(**options)
    selection.pytest_configure(chosen)
    assert chosen.option.slow == ("slow" in chosen.option.markexpr)
    assert selection.long_run == {"draw": "word", "share": 1.0}


def run_pytest(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pytest without this project's own settings and fixtures."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.selection",
        "-c",
        "/dev/null",
        "-p",
        "no:cacheprovider",
    ]
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run([*command, *words], cwd=PROJECT, env=own, capture_output=True, text=True, check=False)


def test_a_refusal_is_one_line_and_no_test_runs() -> None:
    done = run_pytest("--cases", "0", "tests/test_design.py")
    assert (done.returncode, done.stdout) == (pytest.ExitCode.USAGE_ERROR, "")
    assert done.stderr.strip() == "ERROR: --cases: '0' is no number from 1 on; give one, or all"


# Cases.

Cases = Sequence[tuple[str, bool]]  # a schedule, and whether the case is slow


def chosen(
    tried: Cases, *args: str, name: str = "tests/test_one.py::test_one", mark: str = "", **options: Any
) -> list[int]:
    """Return which cases of a function are chosen."""
    calls = [
        SimpleNamespace(id=f"case-{at}", params={"at": at, "of": {"name": schedule}}, marks=[pytest.mark.slow] * slow)
        for at, (schedule, slow) in enumerate(tried)
    ]
    definition = SimpleNamespace(nodeid=name, get_closest_marker=lambda marker: marker == mark)
    function = SimpleNamespace(__name__=name.rpartition("::")[2])
    metafunc: Any = SimpleNamespace(
        config=config(*args, **options), definition=definition, function=function, _calls=calls
    )
    selection.pytest_generate_tests(metafunc)
    assert metafunc.config.stash[COUNTED]["all"] == len(tried) - len(calls)
    return [call.params["at"] for call in calls]


MANY = [("1f1b", False)] * 40
WORDS = [f"word-{k}" for k in range(20)]


@pytest.mark.parametrize(("cases", "most"), [("4", 4), ("1", 1), ("7", 7), ("all", 40), ("41", 40)])
def test_of_many_cases_so_many_are_chosen(cases: str, most: int) -> None:
    assert len(chosen(MANY, cases=cases)) == most


def test_the_first_of_each_kind_is_chosen_before_others() -> None:
    cases = [*MANY, ("zbv", False), *MANY, ("chimera", False), ("pipedream", False)]
    for word in WORDS:
        found = set(chosen(cases, draw=word))
        assert found > {40, 81, 82}
        assert len(found) == 4


def test_quick_cases_are_chosen_before_slow_ones_of_whatever_kind() -> None:
    cases = [("zbv", True), *MANY[:3], ("chimera", True)]
    assert all(set(chosen(cases, draw=word)) > {1, 2, 3} for word in WORDS)
    assert {at for word in WORDS for at in chosen(cases, draw=word)} == {0, 1, 2, 3, 4}


def test_the_draw_and_the_name_decide_which() -> None:
    """A word always chooses the same; twenty words leave none of forty cases out."""
    assert [chosen(MANY, draw=word) for word in WORDS] == [chosen(MANY, draw=word) for word in WORDS]
    assert len({tuple(chosen(MANY, draw=word)) for word in WORDS}) == len(WORDS)
    assert {at for k in range(100) for at in chosen(MANY, draw=f"{k}")} == set(range(40))
    assert chosen(MANY) != chosen(MANY, name="tests/test_one.py::test_two")


def test_a_function_that_is_named_runs_all_of_its_cases() -> None:
    assert chosen(MANY, "tests/test_one.py::test_one") == list(range(40))
    assert len(chosen(MANY, "tests/test_one.py", "tests/test_one.py::test_two")) == 4


def test_a_function_may_be_marked_to_run_all_of_its_cases() -> None:
    assert chosen(MANY, mark="every_case") == list(range(40))
    assert len(chosen(MANY, mark="timeout")) == 4


def test_a_drawn_share_is_added_for_ci() -> None:
    """Within five standard deviations; not of the harness."""
    cases, share = MANY * 50, selection.SHARES["cases"]
    few, more = chosen(cases), chosen(cases, ci=True)
    assert set(few) < set(more)
    assert abs(len(more) - share * 2000) < 5 * (2000 * share * (1 - share)) ** 0.5
    assert len(chosen(cases, ci=True, name="tests/validation/test_one.py::test_one")) == 4


KINDS = {
    "single": "single-cdp",
    "cyclic": "multi-cdp",
    "sharded": "zero-cdp",
    "flushed": "gpipe",
    "looped": "interleaved-1f1b",
    "V": "zbv",
    "both ways": "gems",
    "asynchronous": "pipedream",
    "rounds": "acco",
    "local steps": "diloco",
}


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_a_kind_is_found_wherever_a_case_has_its_schedule(kind: str, name: str) -> None:
    found = [name, SCHEDULES[name], (4, name), {"schedule": name}, [{"of": (SCHEDULES[name], "1f1b")}]]
    assert {kind_in(value) for value in found} == {kind}


def test_all_kinds_occur() -> None:
    assert {kind_of(schedule) for schedule in SCHEDULES.values()} == KINDS.keys()
    assert (kind_in("fsdp"), kind_in("ring"), kind_in(4)) == ("sharded", None, None)


# Slow tests, laws, and the order.


class Item:
    """A test as pytest has it: a name, marks, and the configuration of the run."""

    def __init__(self, nodeid: str, config: Any, *marks: str) -> None:
        self.nodeid, self.config, self.marks = nodeid, config, marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def left(items: list[Item], made: Any) -> list[str]:
    """Return the names of the tests that run, in their order."""
    each = list[Any](items)
    steps = selection.pytest_collection_modifyitems(made, each)
    assert [next(steps, "ended") for _ in range(2)] == [None, "ended"]
    assert made.stash[COUNTED] == {"all": len(items), "chosen": len(each)}
    return [item.nodeid for item in each]


def items_of(made: Any, *marks: str, functions: int = 600) -> list[Item]:
    return [Item(f"tests/test_{k % 7}.py::test_{k}[case]", made, *marks) for k in range(functions)]


@pytest.mark.parametrize(("options", "runs"), [({}, False), ({"slow": True}, True)])
def test_slow_tests_run_where_they_are_asked_for(options: dict[str, Any], runs: bool) -> None:
    for mark, found in (("slow", 600 * runs), ("long", 600)):
        made = config(**options)
        assert len(left(items_of(made, mark), made)) == found


def test_a_slow_function_that_is_named_runs() -> None:
    made = config("tests/test_3.py::test_3")
    assert left(items_of(made, "slow", functions=30), made) == ["tests/test_3.py::test_3[case]"]


def test_a_drawn_share_of_slow_functions_runs_in_ci() -> None:
    made, share = config(ci=True), selection.SHARES["slow"]
    assert abs(len(left(items_of(made, "slow"), made)) - 600 * share) < 5 * (600 * share * (1 - share)) ** 0.5


def test_files_stay_together_in_a_drawn_order() -> None:
    def order(**options: Any) -> list[str]:
        made = config(shuffle=True, **options)
        return left(items_of(made, functions=60), made)

    assert order() == order() != order(draw="other")
    assert sorted(order()) == sorted(item.nodeid for item in items_of(config(), functions=60))
    files = [name.partition("::")[0] for name in order()]
    assert sum(one != other for one, other in pairwise(files)) == 6


def law(count: list[int]) -> Callable[[], None]:
    """Make a law of fifty examples that counts those that are tried."""

    @settings(max_examples=50, database=None)
    @given(st.integers())
    def each(number: int) -> None:
        count.append(number)

    return each


def test_a_law_has_a_fifth_of_its_examples() -> None:
    tried: list[int] = []
    one = law(tried)
    selection.try_fewer_examples(SimpleNamespace(function=one))  # type: ignore[arg-type]
    one()
    assert len(tried) == 10


@pytest.mark.parametrize(
    ("options", "share"), [({}, 0.0), ({"cases": "all"}, 1.0), ({"ci": True}, selection.SHARES["laws"])]
)
def test_laws_have_all_examples_where_all_runs_and_some_in_ci(options: dict[str, Any], share: float) -> None:
    items = items_of(config(**options))
    found = sum(map(selection.has_all_examples, items))  # type: ignore[arg-type]
    assert abs(found - share * len(items)) <= 5 * (len(items) * share * (1 - share)) ** 0.5


TINY = """
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.parametrize("k", range(9))
def test_cases(k): pass

@pytest.mark.slow
def test_slow(): assert False, "does not run"

tried = []

@settings(max_examples=50, database=None)
@given(st.integers())
def test_law(k): tried.append(k)

class TestLaws:
    @settings(max_examples=50, database=None)
    @given(st.integers())
    def test_method(self, k): tried.append(k)

def test_so_many_were_tried(examples): assert (len(tried), examples(50)) == (20, 10)
"""


def test_a_run_says_how_many_were_chosen_and_how_to_run_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "test_tiny.py").write_text(TINY)
    done = run_pytest("--draw", "word", "--rootdir", tmp_path, "-W", "ignore", tmp_path)
    said = "7 of 13 cases were chosen; the same again: --draw word; all: --cases all --slow"
    assert said in done.stdout.splitlines(), done.stdout
    assert re.search(r"^7 passed in", done.stdout, re.MULTILINE)


def test_examples_inside_a_test_are_as_many(examples: Examples, request: pytest.FixtureRequest) -> None:
    assert examples(12) == (12 if selection.has_all_examples(request.node) else 3)


# The word.


def test_without_git_history_the_word_is_the_version(tmp_path: Path) -> None:
    assert commit(tmp_path) == __version__
    (tmp_path / ".git").mkdir()  # with which git can do nothing
    assert commit(tmp_path) == __version__
    selection.pytest_configure(config(draw=__version__))


def test_with_it_the_word_is_the_commit() -> None:
    if not (PROJECT / ".git").exists():
        pytest.skip("is a source distribution")
    log = (PROJECT / ".git" / "logs" / "HEAD").read_text().splitlines()[-1].split()[1]
    assert commit(PROJECT) == log[:12]
