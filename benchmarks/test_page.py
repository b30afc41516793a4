"""The HTML file: the time to write it, its size, the time to open it, and the time of a frame while zooming.

It opens in a headless Chromium that draws in software. A benchmark fails where it misses its target.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.export.page import page
from cdpsim.trace import Trace

STAGES = tuple(
    Stage(
        forward=0.010 + 0.003 * (k % 3),
        backward=0.02 + 0.004 * (k % 2),
        activation=10**9,
        boundary=10**7,
        parameters=10**8,
    )
    for k in range(256)
)
REAL = {
    "model": Model(stages=STAGES),
    "cluster": Cluster(devices=(Devices(),), link=Link(latency=5e-6, bandwidth=1e11)),
}
RUNS: dict[str, dict[str, Any]] = {
    "100 k bars": {"schedule": "multi-cdp", "n": 58, "steps": 8},
    "100 k bars, one device": {"schedule": "single-cdp", "n": 80, "steps": 8},
    "1 M tasks": {"schedule": "multi-cdp", "n": 256, "steps": 8},
    "1 M tasks, real costs": {"schedule": "multi-cdp", "steps": 8, **REAL},
    "1 M tasks, 8 devices": {"schedule": "multi-cdp", "n": 8, "steps": 8192},
}
FRAMES = """async () => {
  const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect(), lasted = [];
  let last = await new Promise(requestAnimationFrame);
  for (let k = 0; k < 200; k++) {
    const place = { clientX: box.left + 300 + 3 * k, clientY: box.top + 120, ctrlKey: true, cancelable: true };
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: Math.floor(k / 50) % 2 ? 60 : -60, ...place }));
    const now = await new Promise(requestAnimationFrame);
    lasted.push(now - last), (last = now);
  }
  return lasted;
}"""


@pytest.fixture(scope="module", params=RUNS)
def run(request: Any) -> Trace:
    """Simulate a run, with all columns that a page needs."""
    trace = simulate(**RUNS[request.param])
    assert len(trace.tasks) and len(trace.messages) and len(trace.memory) and trace.summary()
    return trace


@pytest.fixture(scope="module")
def file(run: Trace, tmp_path_factory: Any) -> Path:
    """Write the page of the run."""
    path: Path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_bytes(b"".join(page(run)))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start one browser for all benchmarks."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield running
        running.close()


def test_writing(run: Trace, benchmark: Any) -> None:
    """Make the bytes of the file from a trace."""
    size = benchmark.pedantic(lambda: sum(map(len, page(run))), rounds=3)
    benchmark.extra_info["bytes"] = size
    assert size <= 40e6


def test_opening(file: Path, browser: Any, benchmark: Any) -> None:
    """Time from the browser's request of the file to the first complete frame."""
    seconds = []

    def opened() -> None:
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(file.as_uri())
        tab.wait_for_selector("html[data-drawn]", timeout=60_000)
        seconds.append(tab.evaluate("performance.now()") / 1000)
        benchmark.extra_info["bars"] = tab.evaluate("cdpsim.bars")
        tab.close()

    benchmark.pedantic(opened, rounds=3)
    assert benchmark.extra_info["bars"] > 120_000 or np.median(seconds) <= 2


def test_zooming(file: Path, browser: Any, benchmark: Any) -> None:
    """Time from one frame to the next while the wheel turns; a browser takes 17 ms at least."""
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-drawn]", timeout=60_000)
    lasted = benchmark.pedantic(tab.evaluate, (FRAMES,), rounds=1)
    drawing = tab.evaluate("cdpsim.frames")
    benchmark.extra_info["frame_ms"] = {share: round(float(np.percentile(lasted, share)), 1) for share in (50, 95, 100)}
    benchmark.extra_info["drawing_ms"] = {share: round(float(np.percentile(drawing, share)), 1) for share in (50, 95)}
    tab.close()
    assert np.percentile(lasted, 95) <= 50
