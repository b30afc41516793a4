"""Pages of papers and of results: Algorithm 1 as printed and as run, and the figures that differ from papers."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdpsim
from cdpsim.schedules.order import CYCLIC
from cdpsim.schedules.placement import BY_MICRO_BATCH_AND_STAGE
from cdpsim.schedules.rule import CDP_V2
from cdpsim.schedules.state import ALONG

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "papers" / "cdp.md").read_text(encoding="utf-8")
N, STAGE, STEP = 3, 1, 2  # what the table of the page shows: the paper's stage 2, in its third step

Worker = tuple[int, int]  # i and j, from 1 on, as the paper counts
Event = tuple[str, Worker, Worker, int]  # send or receive, sender, receiver, training step


def printed_parameters(n: int, steps: int) -> Iterator[Event]:
    """Yield how parameters travel by lines 5, 6 and 36, as they are printed."""
    for t in range(steps):
        for i in range(1, n + 1):
            for j in range(1, n + 1):
                yield "receive", ((i - 1) % n if i != n + 1 - j else n, j), (i, j), t
                yield "send", (i, j), ((i + 1) % n, j), t
                if i == n:
                    yield "send", (i, j), (n + 1 - j, j), t


@pytest.mark.parametrize("n", [2, 3, 5])
def test_as_printed_it_cannot_run(n: int) -> None:
    """The page's reasons, one after another."""
    events = list(printed_parameters(n, 3))
    workers = {(i, j) for i in range(1, n + 1) for j in range(1, n + 1)}
    # Every worker begins with a receive, in step 0, and so none ever sends.
    first = {(receiver if what == "receive" else sender): what for what, sender, receiver, _ in reversed(events)}
    assert all(first[worker] == "receive" for worker in workers)
    # There is a worker 0, of whom the paper has none: one from whom and one to whom is sent, at each stage.
    outside = Counter((what, t) for what, sender, receiver, t in events if not {sender, receiver} <= workers)
    assert outside == {(what, t): n - (what == "receive") for what in ("send", "receive") for t in range(3)}
    # With N in place of 0, one send of each stage has no receiver in each step.
    wrapped = [(what, (s or n, j), (r or n, j), t) for what, (s, j), (r, _), t in events]
    sent, received = (
        Counter((s, r) for what, s, r, t in wrapped if what == kind and t == 1) for kind in ("send", "receive")
    )
    assert Counter(receiver[1] for _, receiver in (sent - received).elements()) == dict.fromkeys(range(1, n + 1), 1)
    assert not received - sent
    # The updater receives what it has made: from another, or at stage 1 from itself.
    assert all(any(r == (n, j) for _, r in received) for j in range(1, n + 1))
    assert ((n, 1), (n, 1)) in received


def worker(device: int | str) -> str:
    """Return a device's worker, as the paper counts."""
    i, j = divmod(int(device), N)
    return f"({i + 1},{j + 1})"


class OneWorker:
    """The lines of the algorithm that the worker of a micro-batch and a stage executes in a step of a run."""

    def __init__(self, run: cdpsim.Run, i: int) -> None:
        self.run, self.i, self.device = run, i, i * N + STAGE
        self.forward, self.backward = (
            next(t for t in run.tasks if (t.kind, t.stage, t.micro_batch, t.step) == (kind, STAGE, i, STEP))
            for kind in "FB"
        )

    def moved(self, content: str, way: str, **where: int) -> str:
        """Return with which worker it exchanges a content, and in which slot."""
        here, there = ("dst", "src") if way == "from" else ("src", "dst")
        where = {"step": STEP, "stage": STAGE, here: self.device} | where
        found = [m for m in self.run.messages if m.content == content and where.items() <= m._asdict().items()]
        assert len(found) < 2
        return "".join(f"{way} {worker(getattr(m, there))} at {m.start}" for m in found) or "–"

    def lines(self) -> dict[str, str]:
        """Return what it does, by the lines of the algorithm."""
        i, reads, makes = self.i, self.forward.version, STEP + 1
        first_reader, follower = (N - 1 - STAGE) * N + STAGE, (i + 1) % N * N + STAGE
        came = self.moved("parameters", "from", step=reads - 1)
        passed_on = self.moved("parameters", "to", step=reads - 1, dst=follower) if follower != first_reader else "–"
        updated = [t for t in self.run.tasks if (t.kind, t.version, t.device) == ("U", makes, self.device)]
        return {
            "5": f"θ{reads} {came}" if came != "–" else f"has θ{reads}",
            "6": f"θ{reads} {passed_on}" if passed_on != "–" else "–",
            "8–11": self.moved("activation", "from", stage=STAGE - 1, micro_batch=i),
            "13": f"at {self.forward.start}",
            "15–16": self.moved("activation", "to", micro_batch=i),
            "20–23": "0" if i == 0 else self.moved("gradient", "from"),
            "24–27": self.moved("activation_gradient", "from", stage=STAGE + 1, micro_batch=i),
            "29–30": f"at {self.backward.start}",
            "32–33": self.moved("activation_gradient", "to", micro_batch=i),
            "35": "".join(f"makes θ{makes} at {t.start}" for t in updated) or "–",
            "36": self.moved("parameters", "to", step=STEP, dst=first_reader),
            "37–38": self.moved("gradient", "to"),
        }


def test_the_page_shows_the_algorithm_as_it_runs() -> None:
    """The last columns of the table are read in a trace: of each of the stage's workers, one column."""
    schedule = cdpsim.Schedule("algorithm-1", "its workers", CYCLIC, BY_MICRO_BATCH_AND_STAGE, CDP_V2, ALONG)
    run = cdpsim.simulate(schedule, N, steps=STEP + 2)
    workers = [OneWorker(run, i).lines() for i in range(N)]
    shown = [[line, *(each[line] for each in workers)] for line in workers[0]]
    table = PAGE.partition("\n| line | as printed |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert [[line, *ran] for line, _, _, *ran in cells if any(ran)] == shown


def test_shares_that_differ_from_papers_are_those_that_the_page_prints() -> None:
    """The least and the most of what its sessions, which are played elsewhere, print of each model."""
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| CDP, Fig\. 4 \| (\S+): (\d+) % less \| (\S+) % to (\S+) %", page, re.MULTILINE)
    assert [name for name, *_ in rows] == ["ViT-B/16", "ResNet-50"]
    for name, paper, least, most in rows:
        model = name.lower().replace("-b/", "-b").replace("-50", "50")
        printed = re.findall(rf"^{model} .* operator .* (\S+) %$", page, re.MULTILINE)
        assert (least, most) == (min(printed), max(printed))
        assert re.search(rf"^\*{name}\*: the paper says {paper} %", page, re.MULTILINE)
