"""Table 3 of the ACCO paper, simulated: what its baseline would take under stated assumptions.

`python -m tests.helpers.acco_paper` prints the table that docs/results.md shows.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from cdpsim import Model, Run, Stage, simulate

BUCKET = 25 * 2**20  # bytes
NVLINK, CARD, PCIE = 300e9, 12.5e9, 25e9  # bytes a second, one way
TOKENS = 24 * 1024  # of a micro-batch in pre-training
NOTHING = 1e-12  # seconds
NUMBER = {"bf16": 2, "fp32": 4}  # bytes of one


@dataclass(frozen=True)
class Row:
    """A row of Table 3 with what goes with it: times in minutes, and micro-batches of all workers in the whole run.

    `accumulated` are the baseline's micro-batches in a step of each worker; `block` those of ACCO. Parameters are those
    of EleutherAI's files, 125 million and 2.651 billion.
    """

    name: str
    parameters: float
    nodes: int
    per_node: int
    inside: float  # bytes a second of a link in a node
    accumulated: int
    block: int
    ddp: int
    acco: int
    printed: float  # the saving of time, in per cent
    micro_batches: float

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.nodes * self.per_node

    @property
    def micro_batch(self) -> float:
        """The seconds of a micro-batch on a worker that is never idle, as ACCO's are."""
        return 60 * self.acco * self.workers / self.micro_batches

    @property
    def bandwidth(self) -> float:
        """The bytes a second of the slowest link."""
        return CARD if self.nodes > 1 else self.inside

    def cluster(self, share: float) -> dict[str, Any]:
        """Return nodes with one card each, whose links reach a share of their bandwidth. Latencies are left out."""
        inside = {"latency": "0 s", "bandwidth": self.inside, "achieved": share}
        if self.nodes == 1:
            return {"link": inside}
        network = {"latency": "0 s", "bandwidth": CARD, "achieved": share}
        return {"topology": {"kind": "nodes", "per_node": self.per_node, "nics": 1, "link": inside, "network": network}}


# Fine-tuning: 50,000 micro-batches. Table 5 calls them steps, and so few make 80M tokens of 200,000 short samples.
ROWS = (
    Row("125M, 1 × 8 H100", 125e6, 1, 8, PCIE, 2, 1, 4 * 60 + 41, 4 * 60 + 25, 5.69, 6e9 / TOKENS),
    Row("125M, 4 × 8 A100", 125e6, 4, 8, NVLINK, 2, 1, 14 * 60 + 41, 10 * 60 + 55, 25.65, 50e9 / TOKENS),
    Row("2.7B, 1 × 8 A100", 2.651e9, 1, 8, NVLINK, 4, 2, 43, 25, 41.86, 50_000),
    Row("2.7B, 2 × 4 A100", 2.651e9, 2, 4, NVLINK, 4, 2, 3 * 60 + 46, 29, 87.17, 50_000),
)


@dataclass(frozen=True)
class Assumed:
    """What the paper does not say of its baseline: how it sums gradients, and how unlike micro-batches are."""

    precision: str = "bf16"  # of gradients on the wire
    reduce: Literal["last", "each"] = "last"  # or after each micro-batch
    share: float = 1.0  # of a link's bandwidth that is reached
    overlap: bool = True  # in buckets, beside the backward
    broadcast: bool = False  # of updated weights in fp32, by their owners; nothing hides it
    jitter: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # coefficient of variation of a micro-batch's time, for each row


COLUMNS = (
    Assumed(),
    Assumed("fp32", share=0.19),
    Assumed("fp32", "each", 0.72, broadcast=True),
    Assumed("fp32", "each", 0.36, overlap=False, broadcast=True),
    Assumed("fp32", "each", 0.8, broadcast=True, jitter=(0.15, 0.15, 0.4, 0.4)),
)


def _model(row: Row, assumed: Assumed, jitter: float) -> Model:
    """Return a model whose stages are buckets: equal ones, or with jitter the last one and all others.

    A backward takes two thirds of a micro-batch. With jitter a micro-batch is two tasks, all of the forward and all of
    the backward.
    """
    size, c = NUMBER[assumed.precision] * row.parameters, row.micro_batch
    many = round(size / BUCKET) if assumed.overlap else 1
    if not jitter:
        stage = Stage(forward=c / 3 / many, backward=2 * c / 3 / many, parameters=round(size / many))
        return Model(stages=(stage,) * many)
    first = Stage(forward=NOTHING, backward=2 * c / 3, parameters=round(size / many))
    return Model(stages=(first, Stage(forward=c / 3, backward=NOTHING, parameters=round(size - size / many))))


@lru_cache
def baseline_step(row: Row, assumed: Assumed, jitter: float = 0.0, steps: int = 3) -> float:
    """Return the seconds of a step of the baseline, on average."""
    disturbed: Any = {"jitter": f"lognormal:{jitter * 3 / 5**0.5:.6f}"} if jitter else {}
    run = simulate(
        "ddp",
        model=_model(row, assumed, jitter),
        cluster=row.cluster(assumed.share),
        m=row.accumulated,
        replicas=row.workers,
        reduce=assumed.reduce,
        collective="ring",
        buckets="none",
        steps=steps,
        **disturbed,
    )
    step = float(run.makespan) / steps if jitter else float(run.steady_state.period)
    owners = NUMBER["fp32"] * row.parameters / (assumed.share * row.bandwidth)
    return step + owners * assumed.broadcast


@lru_cache
def acco(row: Row, share: float, updates: int = 6) -> Run:
    """Return a run of ACCO, whose gradients and parameters are in bf16."""
    c = row.micro_batch
    stage = Stage(forward=c / 3, backward=2 * c / 3, parameters=round(2 * row.parameters))
    return simulate(
        "acco",
        model=Model(stages=(stage,)),
        cluster=row.cluster(share),
        m=row.block,
        replicas=row.workers,
        collective="ring",
        steps=updates,
    )


def handed_over(run: Run) -> list[int]:
    """List how many micro-batches each round but the last, which is thrown away, hands over."""
    assert run.rounds is not None
    counts: list[list[int]] = run.rounds.micro_batches.reshape(-1, run.devices)[:-1].tolist()
    return [sum(each) for each in counts]


def acco_micro_batch(run: Run) -> float:
    """Return the seconds that ACCO's worker takes for a micro-batch, between two updates of its steady state."""
    counts = handed_over(run)
    return float(run.steady_state.period) * run.devices / (counts[-1] + counts[-2])


def saving(row: Row, step: float, micro_batch: float) -> float:
    """Return how much less time ACCO takes for as many micro-batches, in per cent."""
    return 100 * (1 - row.accumulated * micro_batch / step)


def off(row: Row, step: float) -> float:
    """Return the step over the published one."""
    return step / (row.accumulated * row.micro_batch * row.ddp / row.acco)


def columns_of(row: Row) -> list[tuple[float, float]]:
    """Return the saving of each column, and its step over the published one."""
    found = []
    for assumed in COLUMNS:
        jitter = assumed.jitter[ROWS.index(row)]
        step = baseline_step(row, assumed, jitter, 100 if jitter else 3)
        found.append((saving(row, step, acco_micro_batch(acco(row, assumed.share))), off(row, step)))
    return found


def page_rows() -> list[str]:
    """List the rows of the page's table."""
    rows = []
    for row in ROWS:
        cells = [f"{saved:.2f} ({ratio:.2f})" for saved, ratio in columns_of(row)]
        rows.append(f"| {row.name} | {row.printed:.2f} | {' | '.join(cells)} |")
    return rows


NEEDED = (0.02, 0.13, 0.4, 0.0)  # of each row: the jitter with which the last column's other assumptions meet it
MEANING = (
    "hardly unlike micro-batches, and links at 25 GB/s",
    "workers that wait for the slowest of 32 after each micro-batch",
    "workers that wait for the slowest of 8 after each micro-batch, of very unlike ones",
    "gradients in fp32, four times in a step",
)


def needed_rows() -> list[str]:
    """List the rows of the page's table of what each saving needs."""
    assumed, rows = COLUMNS[-1], []
    for row, jitter, meaning in zip(ROWS, NEEDED, MEANING, strict=True):
        alike, found = (
            saving(row, baseline_step(row, assumed, each, 100 if each else 3), row.micro_batch)
            for each in (0.0, jitter)
        )
        rows.append(f"| {row.name} | {row.printed:.2f} | {alike:.2f} | {jitter:g} | {found:.2f} | {meaning} |")
    return rows


if __name__ == "__main__":
    print(*page_rows(), *needed_rows(), sep="\n")
