"""Exact cuts into stages, against all cuts that there are."""

import doctest
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import model
from cdpsim.errors import RequestError
from cdpsim.model import Cuts, balanced

pytestmark = pytest.mark.filterwarnings("error")

costs_and_stages = st.lists(st.integers(0, 30), min_size=1, max_size=9).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def stages(costs: list[int], cuts: Cuts, closing: list[int] | None = None) -> list[int]:
    extra = closing or [0] * len(costs)
    return [sum(costs[begin:end]) + extra[end - 1] for begin, end in pairwise((0, *cuts, len(costs)))]


def rank(sums: list[int]) -> tuple[int, int]:
    return max(sums), sum(cost**2 for cost in sums)


def test_examples_are_right() -> None:
    assert doctest.testmod(model)[:2] == (0, 1)


@given(costs_and_stages)
def test_balanced_cuts_are_the_first_of_the_best(case: tuple[list[int], int]) -> None:
    costs, n = case
    every = list(combinations(range(1, len(costs)), n - 1))
    assert balanced(costs, n) == min(every, key=lambda cuts: (*rank(stages(costs, cuts)), cuts))


def test_every_small_case_is_cut_best() -> None:
    """The largest stage is as small as in any of the cuts."""
    for costs in product((1, 2, 5), repeat=6):
        for n in range(1, 7):
            every = combinations(range(1, 6), n - 1)
            least = min(max(stages([*costs], cuts)) for cuts in every)
            assert max(stages([*costs], balanced(costs, n))) == least, f"{costs} in {n}"


@given(costs_and_stages, st.data())
def test_what_closes_a_stage_counts_once_for_each(case: tuple[list[int], int], data: st.DataObject) -> None:
    costs, n = case
    closing = data.draw(st.lists(st.integers(0, 30), min_size=len(costs), max_size=len(costs)))
    every = list(combinations(range(1, len(costs)), n - 1))
    assert balanced(costs, n, closing) == min(every, key=lambda cuts: (*rank(stages(costs, cuts, closing)), cuts))


@given(costs_and_stages)
def test_another_unit_moves_no_cut(case: tuple[list[int], int]) -> None:
    costs, n = case
    assert balanced([10**15 * cost for cost in costs], n) == balanced(costs, n)


@pytest.mark.parametrize("n", [0, 4])
def test_fewer_layers_than_stages_are_refused(n: int) -> None:
    with pytest.raises(RequestError, match=f"^n={n}: must be at least 1 and at most 3, the number of the model's"):
        balanced([1, 1, 1], n)


def test_a_thousand_layers_are_cut_exactly() -> None:
    """Equal ones into equal stages: any other cuts make one of more than ten layers."""
    assert balanced([1] * 1000, 100) == tuple(range(10, 1000, 10))
