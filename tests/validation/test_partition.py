"""Other cuts into stages than the exact ones, against those."""

import doctest
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdpsim.errors import RequestError
from cdpsim.model import Cuts, balanced

pytest.importorskip("torch")

from validation.profile import cuts as partition
from validation.profile.cuts import authors, read_cuts

costs_and_stages = st.lists(st.integers(0, 30), min_size=1, max_size=9).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def stages(costs: list[int], cuts: Cuts) -> list[int]:
    return [sum(costs[begin:end]) for begin, end in pairwise((0, *cuts, len(costs)))]


def test_examples_are_right() -> None:
    assert doctest.testmod(partition)[:2] == (0, 2)


def by_numpy(case: tuple[list[int], int]) -> Cuts:
    """The authors' cuts by a cumulative sum, its n-th parts, and a search from the left, as they have them."""
    costs, n = case
    sums = np.cumsum(costs)
    return tuple(np.searchsorted(sums, np.arange(1, n) * (sums[-1] // n)).tolist())


def fills_each_stage(case: tuple[list[int], int]) -> bool:
    return all(begin < end for begin, end in pairwise((0, *by_numpy(case), len(case[0]))))


@example(([1, 1, 1, 1, 4], 2))
@given(costs_and_stages)
def test_authors_cuts_are_those_of_their_code(case: tuple[list[int], int]) -> None:
    """Refused where they leave a stage without a layer."""
    if fills_each_stage(case):
        assert authors(*case) == by_numpy(case)
    else:
        with pytest.raises(RequestError, match="without a layer"):
            authors(*case)


@given(costs_and_stages.filter(fills_each_stage))
def test_authors_never_beat_the_exact_cuts(case: tuple[list[int], int]) -> None:
    costs, n = case
    assert max(stages(costs, authors(costs, n))) >= max(stages(costs, balanced(costs, n)))


def test_authors_may_do_worse_than_the_exact_cuts() -> None:
    costs = [3, 3, 3, 3, 1]
    assert stages(costs, authors(costs, 3)) == [3, 3, 7]
    assert stages(costs, balanced(costs, 3)) == [3, 6, 4]


def test_authors_may_leave_a_stage_empty() -> None:
    with pytest.raises(RequestError, match="stage 0 of 2 without a layer; take flops"):
        authors([9, 1], 2)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(RequestError, match="n=4: must be at least 1 and at most 3"):
        authors([1, 1, 1], 4)


@pytest.mark.parametrize("text", ["0,3", "3,3", "5,3", "3,7"])
def test_cuts_that_leave_a_stage_empty_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="must increase from 1 at least to 6 at most"):
        read_cuts(text, 7)


@pytest.mark.parametrize("text", ["", "3,", "a", "flop", "-1", "1.5", "²"])
def test_what_are_no_cuts_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="unknown partition"):
        read_cuts(text, 7)
