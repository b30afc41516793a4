"""Time of workers that go on while they communicate: counts of rounds without a task, and the family side by side."""

from pathlib import Path
from typing import Any

import pytest

from cdpsim import compare, rounds
from cdpsim.trace import table_text

FAMILY = ("ddp", "zero-1", "dpu", "wp", "acco", "local-sgd", "diloco")
UNLIKE = {worker: 1 + worker / 1000 for worker in range(1000)}


@pytest.mark.parametrize("slow", [{3: 4}, UNLIKE], ids=["one slower", "unlike"])
def test_counts(slow: dict[int, float], benchmark: Any, tmp_path: Path) -> None:
    """1,000 workers, 1,000 rounds (500 updates of ACCO), and rounds.csv."""

    def write() -> None:
        found = rounds("acco", replicas=1000, steps=500, slow=slow, model="gpt2", cluster="a100-nodes")
        (tmp_path / "rounds.csv").write_bytes(b"".join(table_text(found)))

    benchmark.pedantic(write, rounds=3)


def test_compare(benchmark: Any) -> None:
    """The family on 64 workers."""
    options: dict[str, Any] = {"replicas": 64, "model": "gpt2", "cluster": "a100-nodes"}
    benchmark.pedantic(lambda: compare(*FAMILY, **options), rounds=3)
