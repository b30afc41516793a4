"""Copies and shares of messages, held against the spec's counting and the bytes of the summary."""

from fractions import Fraction

import numpy as np
import pytest

from cdpsim import simulate
from cdpsim.program.collectives import ALL_REDUCE
from cdpsim.trace.metrics.communication import copied_bytes, sent_shares
from tests.helpers.figures import BOX, PAPER, model
from tests.helpers.strategies import taken


def column(op: str, src: int = -1) -> dict[str, np.ndarray]:
    """Two messages of 12, the second one point to point."""
    return {
        "op": np.array([op, "p2p"]),
        "src": np.array([src, 7]),
        "dst": np.array(["1|2|4|5", "8"], dtype=object),
        "size": np.array([12, 5]),
    }


@pytest.mark.parametrize(
    ("op", "copies"),
    [("all_reduce", 6), ("broadcast", 3), ("reduce", 3), ("all_gather", 3), ("reduce_scatter", 12)],
)
def test_what_must_leave_a_device(op: str, copies: int) -> None:
    """Four members; a member ends with its part of what is scattered, so 48 are cut into four parts of 12."""
    assert copied_bytes(column(op)).tolist() == [12 * copies, 5]
    assert copied_bytes(column("p2p")).tolist() == [12, 5]


@pytest.mark.parametrize(
    ("op", "src", "sent"),
    [
        ("broadcast", 2, {1: 0, 2: 24, 4: 12, 5: 0}),  # 2 hands on to 4, then both, to 5 and 1
        ("reduce", 2, {1: 12, 2: 0, 4: 12, 5: 12}),
        ("all_gather", -1, dict.fromkeys((1, 2, 4, 5), 9)),
        ("reduce_scatter", -1, dict.fromkeys((1, 2, 4, 5), 36)),
        ("all_reduce", -1, dict.fromkeys((1, 2, 4, 5), 18)),  # a ring: three quarters twice
    ],
)
def test_who_sends(op: str, src: int, sent: dict[int, int]) -> None:
    message, device, size = sent_shares(column(op, src), "ring")
    total = dict.fromkeys(sent, 0.0)
    for k, number, amount in zip(message.tolist(), device.tolist(), size.tolist(), strict=True):
        if k == 0:
            total[number] += amount
        else:
            assert (number, amount) == (7, 5)
    assert total == sent


@pytest.mark.parametrize("collective", sorted(ALL_REDUCE))
@pytest.mark.parametrize("name", PAPER)
def test_shares_add_up_to_the_bytes_of_the_summary(name: str, collective: str) -> None:
    for options in ({"n": 3}, {"model": model(4), "cluster": BOX}):
        trace = simulate(**taken({"schedule": name, "n": 4, "collective": collective} | options))
        _, device, size = sent_shares(trace.messages, collective)
        sent = np.bincount(device, size, minlength=trace.summary()["devices"])
        assert sent == pytest.approx(
            [float(Fraction(row["bytes"])) for row in trace.summary()["bytes_sent"]], rel=1e-12
        )
