"""Comparison of Table 1's nine schedules at N = 64 with real costs; it fails above three seconds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from cdpsim import presets
from cdpsim.schedules import TABLE_1

MOST = 3


def test_nine_schedules_of_64_stages(benchmark: Any, tmp_path: Path) -> None:
    """A process as a user waits for it: GPT-2 with 70 blocks, on nodes of eight A100."""
    deep = tmp_path / "deep.toml"
    deep.write_text(presets.preset_text("models", "gpt2").replace("repeat = 12", "repeat = 70").replace(" 13,", " 71,"))
    options = ["-n", "64", "--model", str(deep), "--cluster", "a100-nodes"]
    command = [sys.executable, "-m", "cdpsim", "compare", *TABLE_1, *options]
    done = benchmark.pedantic(
        subprocess.run, (command,), {"check": True, "capture_output": True}, rounds=5, warmup_rounds=1
    )
    table, _ = done.stdout.split(b"\n\n")
    assert len(table.splitlines()) == 2 + 9
    assert benchmark.stats.stats.min < MOST
