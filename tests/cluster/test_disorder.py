"""Disorder as files and options say it: read, written, refused."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cdpsim import Cluster, RequestError, simulate
from cdpsim.cluster.disorder import Disorder, Slow, Stop, disorder_of, read_jitter
from cdpsim.presets import find_cluster
from tests.helpers.every_row import every_row

FILE = """name = "box"
[devices]
count = 4
[disorder]
jitter = "lognormal:0.1"
link_jitter = "uniform:0.5"
[[disorder.slow]]
device = 3
factor = 4
[[disorder.stop]]
device = 1
at = "2 s"
lasts = "500 ms"
[[disorder.stop]]
device = 2
at = 7
"""
READ = Disorder(
    jitter="lognormal:0.1",
    link_jitter="uniform:0.5",
    slow=(Slow(device=3, factor=4),),
    stop=(Stop(device=1, at=2.0, lasts=0.5), Stop(device=2, at=7.0)),
)


@pytest.mark.parametrize("ending", [".toml", ".json"])
def test_a_cluster_file_may_say_it(tmp_path: Path, ending: str) -> None:
    """And writing and reading it again gives the same."""
    (tmp_path / "box.toml").write_text(FILE)
    cluster = Cluster.load(tmp_path / "box.toml")
    assert cluster.disorder == READ
    cluster.save(tmp_path / f"again{ending}")
    assert Cluster.load(tmp_path / f"again{ending}") == cluster
    assert "disorder" not in Cluster().to_builtins()


def test_options_say_the_same() -> None:
    found = disorder_of(
        Disorder(),
        slow=["3:4"],
        jitter="lognormal:0.1",
        link_jitter="uniform:0.5",
        stop=["1:2 s:500 ms", "2:7s"],
        slots=False,
    )
    assert found == READ


def test_options_take_the_place_of_what_the_cluster_says() -> None:
    """Each option replaces its own part of the cluster's disorder; the rest stays."""
    found = disorder_of(READ, slow=["0:2"], jitter="exponential:1", slots=False)
    assert found == Disorder(
        jitter="exponential:1", link_jitter=READ.link_jitter, slow=(Slow(device=0, factor=2),), stop=READ.stop
    )


@pytest.mark.parametrize("option", ["slow", "stop", "jitter", "link_jitter"])
def test_none_is_as_the_cluster_says(option: str) -> None:
    """A cluster whose device 1 is half as fast: not as slow as it is asked to be."""
    disorder = Disorder(slow=(Slow(device=1, factor=2.0),))
    asked: dict[str, Any] = {"model": "gpt2", "cluster": replace(find_cluster("pcie-box"), disorder=disorder)}
    assert simulate("1f1b", 2, **asked | {option: None}) == simulate("1f1b", 2, **asked)
    assert simulate("1f1b", 2, **asked) != simulate("1f1b", 2, **asked, slow={1: 3})


def test_what_changes_nothing_is_left_out() -> None:
    found = disorder_of(
        READ, slow=["3:1"], jitter="uniform:0", link_jitter="lognormal:0e0", stop=["1:3s:0s"], slots=False
    )
    assert found == Disorder()


def test_slots_are_whole_and_have_no_unit() -> None:
    found = disorder_of(Disorder(), stop=["3:12:2", "0:5"], slots=True)
    assert found.stop == (Stop(device=3, at=12, lasts=2), Stop(device=0, at=5))
    assert found.recorded(slots=True) == {"stop": ["3:12:2", "0:5"]}


@every_row(
    ("asked", "message"),
    [
        ({"slow": ["3"]}, "slow: '3' is not DEVICE:FACTOR; write for example '3:4'"),
        ({"slow": ["x:4"]}, "slow: 'x:4' is not"),
        ({"slow": ["-1:4"]}, "slow: '-1:4' is not"),
        ({"slow": ["3:-4"]}, "slow: '3:-4' is not"),
        ({"slow": ["3:nan"]}, "slow: '3:nan' is not"),
        ({"slow": ["3:0"]}, "slow: factor 0 is not between 1e-06 and 1e\\+06"),
        ({"slow": ["3:1e400"]}, "slow: factor 1e400 is not between"),
        ({"slow": ["99999999999:2"]}, "slow: device 99999999999 is beyond any cluster"),
        ({"slow": ["9" * 5000 + ":2"]}, "slow: .* is not DEVICE:FACTOR"),
        ({"slow": ["3:2", "3:4"]}, "slow: device 3 is there twice"),
        ({"slow": "3:4"}, "slow: takes a list of Slow or of texts"),
        ({"slow": [3]}, "slow: takes a list of Slow or of texts"),
        ({"jitter": "lognormla:0.1"}, "unknown distribution 'lognormla'; did you mean 'lognormal'"),
        ({"jitter": "x"}, "unknown distribution 'x'; known are uniform, exponential, lognormal"),
        ({"jitter": "lognormal"}, "jitter: 'lognormal' needs a coefficient of variation from 0 to 10"),
        ({"jitter": "lognormal:-0.1"}, "jitter: 'lognormal:-0.1' needs"),
        ({"jitter": "lognormal:11"}, "from 0 to 10"),
        ({"jitter": "lognormal:inf"}, "from 0 to 10"),
        ({"jitter": "lognormal:1e400"}, "from 0 to 10"),
        ({"jitter": "uniform:0.6"}, "from 0 to 0.577; write for example 'uniform:0.1'"),
        ({"link_jitter": "exponential:1.5"}, "link-jitter: 'exponential:1.5' needs .* from 0 to 1;"),
        ({"stop": ["3"]}, "stop: '3' is not DEVICE:AT or DEVICE:AT:FOR; write for example '3:2 s:500 ms'"),
        ({"stop": ["3:"]}, "stop: '3:' is not"),
        ({"stop": ["3:1s:2s:3s"]}, "is not DEVICE:AT"),
        ({"stop": ["3:2"]}, "stop: '2': no unit"),
        ({"stop": ["3:-2 s"]}, "stop: '-2 s': not between 0 and"),
        ({"stop": ["3:2 GB"]}, "stop: '2 GB': not a time"),
        ({"stop": ["99999999999:2 s"]}, "stop: device 99999999999 is beyond"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        disorder_of(Disorder(), slots=False, **asked)


@pytest.mark.parametrize("text", ["3:2 s", "3:-1", "3:1.5", "3:1:0.5", "3:9999999999"])
def test_parts_of_slots_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"stop: .* is not a whole number of slots; write for example '3:12:2'"):
        disorder_of(Disorder(), stop=[text], slots=True)


@every_row(
    ("content", "message"),
    [
        ({"slow": [{"device": -1, "factor": 2}]}, r"x: \$.slow\[0\].device"),
        ({"slow": [{"device": 1, "factor": 0}]}, r"x: \$.slow\[0\].factor"),
        ({"slow": [{"device": 1, "factor": float("inf")}]}, r"x: \$.slow\[0\].factor"),
        ({"stop": [{"device": 1, "at": "-1 s"}]}, r"x: \$.stop\[0\].at"),
        ({"stop": [{"device": 1}]}, "missing required field `at`"),
        ({"stops": []}, "unknown field 'stops'; did you mean 'stop'"),
        ({"jitter": "x:1"}, "unknown distribution 'x'"),
        ({"jitter": 3}, r"x: \$.jitter"),
    ],
)
def test_what_a_file_says_is_held_to_the_same_rules(content: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Disorder.from_builtins(content, "x")


def test_devices_that_are_not_there_are_refused() -> None:
    READ.require(4)
    with pytest.raises(RequestError, match="slow: there is no device 3 for the schedule; take one from 0 to 2"):
        READ.require(3)
    with pytest.raises(RequestError, match="stop: there is no device 1 for the schedule; the only one is 0"):
        Disorder(stop=READ.stop).require(1)


def test_a_title_says_what_is_out_of_order() -> None:
    assert READ.words() == [
        "device 3 slow ×4",
        "device 1 stops",
        "device 2 stops",
        "jitter lognormal:0.1",
        "link jitter uniform:0.5",
    ]
    assert read_jitter("jitter", "uniform:5e-1") == ("uniform", 0.5)
