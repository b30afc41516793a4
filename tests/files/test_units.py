"""Quantities mean what they say, to the last bit, and everything else is refused in one line."""

import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim.errors import RequestError
from cdpsim.files import units
from cdpsim.files.units import Work, bandwidth, quantity_text, seconds, size_bytes, speed, time_or_work

pytestmark = pytest.mark.filterwarnings("error")

Read = Callable[[object], Any]
READERS: list[Read] = [seconds, time_or_work, size_bytes, speed, bandwidth]


@pytest.mark.parametrize(
    ("read", "given", "amount"),
    [
        (seconds, "25 us", 25e-6),
        (seconds, "25us", 25e-6),
        (seconds, "25 µs", 25e-6),  # the micro sign
        (seconds, "25 μs", 25e-6),  # the Greek letter
        (seconds, "0.3 ns", 0.3e-9),
        (seconds, "7 ps", 7e-12),
        (seconds, "+1.5e3 s", 1500.0),
        (seconds, "1 ks", 1000.0),
        (seconds, "0 s", 0.0),
        (seconds, 2, 2),
        (seconds, np.float32(0.5), 0.5),
        (seconds, Fraction(1, 4), 0.25),
        (seconds, 1e9, 1e9),
        (time_or_work, "2 ms", 0.002),
        (time_or_work, "2.5 TFLOP", Work(2.5e12)),
        (time_or_work, Work(3), Work(3)),
        (time_or_work, 1, 1),
        (size_bytes, "80 GB", 80 * 10**9),
        (size_bytes, "1.5 kB", 1500),
        (size_bytes, "1 KB", 1000),
        (size_bytes, "16 MiB", 2**24),
        (size_bytes, "1.5 KiB", 1536),
        (size_bytes, "2 GiB", 2**31),
        (size_bytes, "1 TiB", 2**40),
        (size_bytes, "1 PB", 10**15),
        (size_bytes, "0.1 GB", 10**8),
        (size_bytes, "1000.001 kB", 1000001),
        (size_bytes, 7.0, 7),
        (size_bytes, np.int64(7), 7),
        (size_bytes, 0, 0),
        (speed, "312 TFLOPS", 312e12),
        (speed, "312 TFLOP/s", 312e12),
        (speed, "1 EFLOPS", 1e18),
        (speed, 5, 5),
        (bandwidth, "300 GB/s", 300e9),
        (bandwidth, "1 GiB/s", 2**30),
        (bandwidth, "inf", math.inf),
        (bandwidth, math.inf, math.inf),
        (bandwidth, 0.25, 0.25),
    ],
)
def test_a_quantity_is_read_in_its_base_unit(read: Read, given: object, amount: float) -> None:
    got = read(given)
    assert got == amount
    assert isinstance(got, int if read is size_bytes else float)  # an array of integers would cut what joins it
    assert isinstance(got, Work) == isinstance(amount, Work)


REFUSED: dict[str, list[object]] = {
    "no number": [
        *("", " ", "s", "inf s", "inf B/s", "nan", "nan s", "∞ s", "-inf", "1e s", "1.2.3 s", "--5 s", "$5"),
        *("1,000 s", "1_000 s", "1'000 s", "0x10 s", "\u0665 s", "\uff15 s", "x" * 10_000, "1" * 10_000 + " s"),
    ],
    "no unit": ["5", "5 k", "5 %", "5 min", "5 S", "5 cs", "5 parsec", "5 gb", "5 Kis", "5 s/s", "5 FLOP / s"],
    "not alone": ["5 s x", "1e3 ms", "5 s -- as measured", "x = 5 s", "5\ns", "5 s\n", " 5 s", "5  s"],
    "too large": ["1e400 s", "1e400 B", "1e400 FLOPS", "1e400 B/s", "1e400 FLOP", "2e9 s", "2 EB", "2e18 B/s"],
    "too small": ["-1 s", "-1 B", "-1 FLOP", "-1 FLOPS", "-1 B/s", "0 FLOPS", "0 B/s", "0 FLOP"],
    "number": [math.nan, -math.inf, -1, -0.5, 1e30, 10**400, 10**5000, np.float64("nan")],
    "work": [Work(-1), Work(0), Work(math.inf), Work(1e25)],
    "no quantity": [np.ones(2), True, False, None, [], {}, b"5 s", 1j, np.bool_(True)],
}


def refuses(read: Read, given: object) -> bool:
    """Whether a reader answers with one short line and an example."""
    try:
        read(given)
    except RequestError as refusal:
        said = str(refusal)
        return "; write for example '" in said and said.isprintable() and len(said) < 200
    return False


@pytest.mark.parametrize("kind", REFUSED)
def test_everything_else_is_refused_in_one_line_with_an_example(kind: str) -> None:
    """By each reader."""
    pairs = [(read, given) for read in READERS for given in REFUSED[kind]]
    assert not [(read.__name__, given) for read, given in pairs if not refuses(read, given)]


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (seconds, "5 GB", "'5 GB': not a time; write for example '5 us'"),
        (seconds, "5", "'5': no unit; write for example '5 us'"),
        (seconds, Work(1), "Work(1.0): not a time; write for example '5 us'"),
        (seconds, math.inf, "inf: not between 0 and 1e+09 s; write for example '5 us'"),
        (time_or_work, "5 GB", "'5 GB': not a time or work; write for example '5 us'"),
        (time_or_work, 0, "0: not between 1e-30 and 1e+09 s; write for example '5 us'"),
        (time_or_work, "0 FLOP", "'0 FLOP': not between 1e-30 and 1e+24 FLOP; write for example '2.5 TFLOP'"),
        (size_bytes, "80 Gb", "'80 Gb': bits, not bytes; write for example '80 GB'"),
        (size_bytes, "1.1 KiB", "'1.1 KiB': a fraction of a byte; write for example '80 GB'"),
        (size_bytes, 0.5, "0.5: a fraction of a byte; write for example '80 GB'"),
        (size_bytes, 10**15 + 1, f"{10**15 + 1}: not between 0 and 1e+15 B; write for example '80 GB'"),
        (size_bytes, "300 GB/s", "'300 GB/s': not a size; write for example '80 GB'"),
        (speed, "2.5 TFLOP", "'2.5 TFLOP': not a speed; write for example '312 TFLOPS'"),
        (bandwidth, "100 Gb/s", "'100 Gb/s': bits, not bytes; write for example '300 GB/s'"),
        (bandwidth, "100 Gbps", "'100 Gbps': bits, not bytes; write for example '300 GB/s'"),
        (bandwidth, "100 Gbit/s", "'100 Gbit/s': bits, not bytes; write for example '300 GB/s'"),
        pytest.param(
            bandwidth,
            10**5000,
            "this number: not between 1e-09 and 1e+18 B/s; write for example '300 GB/s'",
            id="huge",
        ),
    ],
)
def test_a_refusal_says_what_was_expected(read: Read, given: object, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(given)
    assert str(refusal.value) == message


@pytest.mark.parametrize("read", [seconds, time_or_work, size_bytes, speed])
@pytest.mark.parametrize("given", ["inf", math.inf])
def test_only_a_bandwidth_can_be_infinite(read: Read, given: object) -> None:
    with pytest.raises(RequestError):
        read(given)


@pytest.mark.parametrize(
    ("amount", "unit", "shown"),
    [
        (25e-6, "s", "25 us"),
        (1, "s", "1 s"),
        (0.0, "s", "0 s"),
        (80 * 10**9, "B", "80 GB"),
        (2.5e12, "FLOP", "2.5 TFLOP"),
        (312e12, "FLOPS", "312 TFLOPS"),
        (math.inf, "B/s", "inf"),
        (0.1 + 0.2, "s", "300.00000000000004 ms"),
        (1e-300, "s", "1e-300 s"),
    ],
)
def test_a_quantity_is_written_as_people_do(amount: float, unit: str, shown: str) -> None:
    assert quantity_text(amount, unit) == shown


@given(st.floats(0, 1e9))
def test_a_written_time_is_read_back_to_the_last_bit(amount: float) -> None:
    assert seconds(quantity_text(amount, "s")) == amount


@given(st.floats(1e-30, 1e24))
def test_written_work_is_read_back_to_the_last_bit(amount: float) -> None:
    assert time_or_work(quantity_text(Work(amount), "FLOP")) == Work(amount)


@given(st.integers(0, 10**15))
def test_a_written_size_is_read_back_to_the_last_byte(amount: int) -> None:
    assert size_bytes(quantity_text(amount, "B")) == amount


@given(st.floats(1e-9, 1e21))
def test_a_written_speed_is_read_back_to_the_last_bit(amount: float) -> None:
    assert speed(quantity_text(amount, "FLOPS")) == amount


@given(st.floats(1e-9, 1e18) | st.just(math.inf))
def test_a_written_bandwidth_is_read_back_to_the_last_bit(amount: float) -> None:
    assert bandwidth(quantity_text(amount, "B/s")) == amount


@given(st.text(max_size=80))
def test_no_text_breaks_a_reader(given: str) -> None:
    for read in READERS:
        try:
            amount = read(given)
        except RequestError as refusal:
            assert str(refusal).isprintable()
        else:
            assert amount >= 0


def test_work_is_never_a_number_of_seconds() -> None:
    assert Work(2) == Work(2.0)
    assert Work(2) != 2.0
    assert Work(2) != Work(3)
    assert [Work(2) != Work(2.0), Work(2) == 2.0] == [False, False]
    assert len({Work(2), Work(2.0), 2.0}) == 2
    assert repr(Work(2)) == "Work(2.0)"
    assert Work(4) / 2 == 2.0


def test_reading_quantities_leaves_the_preferences_of_quantiphy_alone() -> None:
    from quantiphy import Quantity

    units.seconds("5 us")
    assert float(Quantity("5 cm")) == 0.05


def test_the_slow_libraries_are_imported_only_when_they_are_needed() -> None:
    code = "import sys, cdpsim.model, cdpsim.cluster; print({'quantiphy', 'tomli_w'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
