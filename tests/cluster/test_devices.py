"""Devices compute as fast as their precision and their achieved share say."""

import pytest

from cdpsim.cluster import Cluster, Devices, Speeds
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import Model, Stage
from cdpsim.timing.costs import reached
from tests.helpers.every_row import every_row

A100 = Speeds(fp32=19.5e12, bf16=312e12)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("devices", "precision", "speed"),
    [
        (Devices(speeds=A100), "bf16", 312e12),
        (Devices(speeds=A100), "fp32", 19.5e12),
        (Devices(speeds=A100, achieved=0.5), "bf16", 156e12),
        (Devices(speeds=A100, achieved=0.5), None, None),
        (Devices(speed=3e12), "bf16", 3e12),  # one speed serves every precision, and is taken as it is
        (Devices(speed=3e12), "fp8", 3e12),
        (Devices(speed=3e12), "", 3e12),
        (Devices(speed=3e12), None, 3e12),
        (Devices(speed=3e12, achieved=0.25), "fp8", 0.75e12),
        (Devices(), "bf16", None),
    ],
)
def test_a_precision_has_its_speed(devices: Devices, precision: str | None, speed: float | None) -> None:
    assert Cluster(devices=(devices,)).speeds(2, precision) == [speed, speed]


@pytest.mark.parametrize(
    ("precision", "problem"),
    [
        ("fp8", "has no speed for a model in 'fp8', only for fp32, bf16; take another cluster or precision"),
        ("", "has speeds for fp32, bf16, but the model does not say which it computes in; write precision = 'fp32'"),
    ],
)
def test_a_precision_without_a_speed_is_refused_with_what_there_is(precision: str, problem: str) -> None:
    cluster = Cluster(name="box", devices=(Devices(count=1, speed=1e12), Devices(count=2, speeds=A100)))
    assert cluster.speeds(1, precision) == [1e12]  # the second group has no part in it
    with pytest.raises(RequestError) as refusal:
        cluster.speeds(2, precision)
    assert str(refusal.value).startswith(f"cluster 'box': {problem}")
    assert "\n" not in str(refusal.value)


def test_groups_differ_in_speed() -> None:
    slow, fast = Devices(count=1, speeds=A100, achieved=0.1), Devices(count=2, speed=5e12)
    assert Cluster(devices=(slow, fast)).speeds(3, "bf16") == [31.2e12, 5e12, 5e12]


def test_a_model_of_times_needs_no_precision() -> None:
    cluster = Cluster(devices=(Devices(speeds=A100),))
    times = Model(stages=(Stage(forward=1.0, backward=2.0),))
    assert reached(cluster, 1, times) == [None]
    work = Model(stages=(Stage(forward=1.0, backward=Work(2e12)),))
    with pytest.raises(RequestError, match="does not say which it computes in"):
        reached(cluster, 1, work)
    assert reached(Cluster(devices=(Devices(speed=7.0),)), 1, work) == [7.0]


@every_row(
    ("content", "problem"),
    [
        ({"speeds": {}}, "$.devices.speeds: speeds: has none; give at least one of fp64, fp32, tf32, bf16, fp16, fp8"),
        ({"speeds": {"bf61": 1}}, "$.devices.speeds: unknown field 'bf61'; did you mean 'bf16'?"),
        ({"speeds": {"bf16": "312 TFLOP"}}, "$.devices.speeds.bf16: '312 TFLOP': not a speed"),
        ({"speed": 1, "speeds": {"bf16": 1}}, "$.devices: speed: and speeds both say how fast it is; keep one"),
        ({"achieved": 0.5}, "$.devices: achieved: is a share of speed or speeds; give one"),
        ({"speed": 1, "achieved": 0}, "$.devices.achieved: expected `float` > 0.0"),
        ({"speed": 1, "achieved": 1.5}, "$.devices.achieved: expected `float` <= 1.0"),
        ({"speed": 1, "achieved": "44 %"}, "$.devices.achieved: expected `float | null`, got `str`"),
    ],
)
def test_wrong_speeds_are_refused(content: object, problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Cluster.from_builtins({"devices": content}, "box.toml")
    assert str(refusal.value).startswith(f"box.toml: {problem}")


@every_row(
    ("memory", "read"),
    [(80, None), (999_999.0, None), (0, None), (10**6, 10**6), ("80 GB", 80 * 10**9), ("80 B", 80)],
)
def test_a_memory_below_a_megabyte_has_a_unit(memory: object, read: int | None) -> None:
    """Few bytes are hardly meant in a file; in Python, and in what is recorded, a number stays one of bytes."""
    for groups in ({"memory": memory}, [{"count": 1, "memory": "1 GB"}, {"count": 1, "memory": memory}]):
        if read is None:
            problem = f'{memory} means {memory} bytes; give its unit, as in "{memory} GB" or "{memory} B"'
            with pytest.raises(RequestError) as refusal:
                Cluster.from_builtins({"devices": groups}, "box.toml")
            assert str(refusal.value) == f"box.toml: $.devices.memory: {problem}"
        else:
            assert Cluster.from_builtins({"devices": groups}, "box.toml").devices[-1].memory == read
    small = Cluster(devices=(Devices(memory=80),))
    assert Cluster.from_builtins(small.to_builtins(), "record") == small


def test_a_model_computes_in_its_precision() -> None:
    model = Model(stages=(Stage(forward=Work(1.0), backward=1.0),), precision="bf16")
    assert reached(Cluster(devices=(Devices(speeds=A100, achieved=0.5),)), 1, model) == [156e12]


def test_groups_differ_in_what_overlaps() -> None:
    groups = (Devices(count=1, overlap="none"), Devices(count=2), Devices(count=1, overlap="stream"))
    cluster = Cluster(devices=groups)
    assert cluster.overlaps(4) == ["none", "full", "full", "stream"]
    assert cluster.overlaps(2) == ["none", "full"]
    assert Cluster.from_builtins(cluster.to_builtins(), "box") == cluster
    assert Cluster().overlaps(3) == ["full"] * 3
