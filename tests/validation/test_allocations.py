"""The allocator's own events give the level and the peak of what is allocated."""

import pytest

torch = pytest.importorskip("torch")

from validation.profile.allocations import Allocations


def test_the_level_is_what_live_tensors_weigh() -> None:
    """Also the scratch inside a function, which no tensor shows afterwards."""
    with Allocations() as record:
        begin = record.now()
        kept = torch.zeros(1000)
        scratch = torch.ones(5000)
        middle = record.now()
        del scratch
        end = record.now()
    assert record.at(begin) == 0
    assert record.at(middle) == record.peak(begin, end) == 4 * 6000
    assert record.at(end) == record.peak(end, end) == kept.nbytes == 4000


def test_nothing_allocated_is_no_event() -> None:
    with Allocations() as record:
        pass
    assert len(record.moment) == 0
    assert record.peak(0, record.now()) == 0
