"""Comparison of foreign runtimes with their simulations: each is run on ranks, measured, and simulated."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import nn

from cdpsim.model import Cuts, Model
from cdpsim.model.recipe import apply_recipe

from ..comparison.forecast import Forecast, forecast_by_ranks
from ..profile.command import profile
from ..profile.workspaces import workspaces_of_stages
from ..ranks.launcher import Ranks, Result
from ..replay.case import Case, build_training
from ..report.schema import (
    Call,
    DevicePeak,
    Messages,
    PeerReport,
    PeerRequest,
    PeerTime,
    SimulatedMemory,
    relative_error,
)
from ..training.models import MODELS
from ..training.optimizer import OPTIMIZERS
from ..training.passes import one_thread
from .measure import (
    ContentsOfRank,
    MemoryOfRank,
    StepInterval,
    measure_memory,
    measure_time,
    observe,
    train,
)
from .prediction import RUNTIMES, Prediction, predict_peer, predict_seconds
from .runtimes import PEERS, Ended, Peer, copied_stages, own_stages, parameters_of

TOLERANCE = 0.01  # of a device's peak
PARAMETER_TOLERANCES = {"cpu": 1e-12, "cuda": 1e-9}  # in float64; a GPU's kernels add in another order
MOST_TRIES = 6  # of a measurement, until no block was freed by a thread that the profiler does not see
TRAINED_STEPS = 2


@lru_cache(maxsize=8)  # several runtimes train the same
def layers_of(model: str, n: int, batch: int, dtype: str, optimizer: str, sizes: tuple[tuple[str, int], ...]) -> Model:
    """Return a model's layers as `profile` finds them; n of a model that has as many as there are stages."""
    how: dict[str, Any] = {"batch": batch, "dtype": dtype, "optimizer": optimizer} | dict(sizes)
    return profile(model, n if model in MODELS else None, **how).model


class Workload(NamedTuple):
    """The model that all runtimes train, on how many ranks, and with how many micro-batches in a pipeline."""

    ranks: int
    m: int
    model: str = "transformer"
    sizes: tuple[tuple[str, int], ...] = (("width", 256), ("length", 64), ("heads", 4))
    batch: int = 8
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def backend(self) -> str:
        """The backend of `torch.distributed` for its device."""
        return "nccl" if self.device == "cuda" else "gloo"

    def case(self, peer: Peer) -> Case:
        """Return the case of cdpsim that corresponds to a runtime, with its stages.

        These have as many FLOP as can be balanced; of `dp` each is a layer, or there is one for each rank.
        """
        ranked = peer.schedule == "dp"  # whether a rank has micro-batches of its own, by the simulation's words
        given = (self.model, self.ranks * peer.chunks, self.batch, self.dtype, peer.optimizer, self.sizes)
        layers = layers_of(*given)
        n = layers.n if ranked else self.ranks * peer.chunks
        return Case(
            peer.schedule,
            n,
            steps=TRAINED_STEPS,
            m=self.m if peer.kind == "pipeline" else peer.m if ranked else self.ranks,
            replicas=self.ranks if ranked else 1,
            chunks=peer.chunks,
            model=self.model,
            optimizer=OPTIMIZERS[peer.optimizer],
            batch=self.batch,
            dtype=self.dtype,
            sizes=self.sizes,
            cuts=layers.cuts(n),
            stages=apply_recipe(layers, n=n),
            device=self.device,
            backend=self.backend,
        )


STANDARD = Workload(4, 8)


class Measurements(NamedTuple):
    """All that ranks have measured of a runtime."""

    memory: list[MemoryOfRank]
    contents: list[ContentsOfRank]
    ended: list[Ended]
    steps: list[list[StepInterval]]


class Comparer:
    """Ranks that stay alive over many runtimes, with the profiles, times and equations that several of them share."""

    def __init__(self, ranks: Ranks, workload: Workload, *, repeats: int = 3, timeout: float = 300.0) -> None:
        self._ranks, self._workload = ranks, workload
        self._repeats, self._timeout = repeats, timeout
        self._forecasts: dict[tuple[int, bool], Forecast | None] = {}
        self._alone: dict[tuple[Cuts | None, int, str], Ended] = {}

    def compare(self, peer: Peer) -> PeerReport:
        """Run a runtime for its memory, contents and messages, parameters and time, and compare each."""
        case = self._workload.case(peer)
        measured = self._measure(peer, case)
        apart = self._apart(case, measured.ended)
        calls = [[call for call in own.calls if call.call != "receive"] for own in measured.contents]
        devices = [_device_peak(peer, case, rank, measured) for rank in range(self._workload.ranks)]
        report = PeerReport(
            name=peer.name,
            about=peer.about,
            schedule=peer.schedule,
            ranks=self._workload.ranks,
            request=PeerRequest(
                **{name: getattr(case.shape, name) for name in ("n", "m", "chunks")},
                **{name: getattr(case, name) for name in ("model", "batch", "dtype", "device", "backend")},
                **{name: getattr(peer, name) for name in ("optimizer", "recompute")},
                sizes=dict(case.sizes),
            ),
            judged=True,
            devices=devices,
            messages=Messages(torch=calls),
            max_abs_difference=apart if apart == apart else None,
            time=self._compare_time(peer, case, measured.steps),
            ok=False,
        )
        return simulate_anew(report)

    def _measure(self, peer: Peer, case: Case) -> Measurements:
        best = self._observe(peer, case)
        for _ in range(MOST_TRIES - 1):
            if not any(unseen(*pair) for pair in best):
                break
            tries = zip(best, self._observe(peer, case), strict=True)
            best = [min(pairs, key=lambda pair: (abs(unseen(*pair)), measured_peak(*pair))) for pairs in tries]
        ended = self._call(train, peer, replace(case, dtype="float64"))
        steps = self._call(measure_time, peer, case, self._repeats) if self._repeats else []
        return Measurements([memory for memory, _ in best], [contents for _, contents in best], ended, steps)

    def _observe(self, peer: Peer, case: Case) -> list[tuple[MemoryOfRank, ContentsOfRank]]:
        contents = self._call(observe, peer, case)
        return list(zip(self._call(measure_memory, peer, case), contents, strict=True))

    def _call(self, function: Callable[..., Result], peer: Peer, case: Case, *more: object) -> list[Result]:
        return self._ranks.call(function, peer.name, replace(case, stages=None), *more, timeout=self._timeout)

    def _apart(self, case: Case, ended: Sequence[Ended]) -> float:
        """Return the largest difference between the parameters that ranks ended with and those of one process."""
        m = case.shape.replicas * case.shape.m
        key = case.cuts, m, case.optimizer.kind
        if key not in self._alone:
            self._alone[key] = trained_alone(replace(case, dtype="float64", device="cpu"), m)
        return float(np.max([np.abs(theta - self._alone[key][j]).max() for own in ended for j, theta in own.items()]))

    def _compare_time(self, peer: Peer, case: Case, steps: list[list[StepInterval]]) -> PeerTime | None:
        if not steps:
            return None
        together = zip(*steps, strict=True)
        took = statistics.median(max(own.end for own in step) - min(own.begin for own in step) for step in together)
        key = case.n, peer.splits
        if key not in self._forecasts:
            devices = self._workload.ranks
            self._forecasts[key] = forecast_by_ranks(case, self._ranks, devices, timeout=self._timeout)
        forecast = self._forecasts[key]
        assert forecast is not None, "this process has the ranks' results"
        seconds = predict_seconds(peer, case, RUNTIMES[-1], forecast)
        return PeerTime(torch_seconds=took, simulated_seconds=seconds, relative_error=relative_error(seconds, took))


def trained_alone(case: Case, m: int) -> Ended:
    """Return a case's parameters as one process trains them, which has all m micro-batches of a step."""
    training = build_training(case)
    own = copied_stages(training, range(case.n), training.device)
    model = nn.Sequential(*own.values())
    optimizer = case.optimizer.over(list(model.parameters()))
    with one_thread():
        for step in range(case.steps):
            optimizer.zero_grad()
            for x, target in (training.data(step, i) for i in range(m)):
                torch.autograd.backward(training.loss(model(x), target, m))
            optimizer.step()
    return parameters_of(own)


def unseen(memory: MemoryOfRank, contents: ContentsOfRank) -> int:
    """Return the bytes that a step freed and the allocator's record does not have: another thread freed them."""
    return (memory.after - contents.after) - (memory.before - contents.before)


def measured_peak(memory: MemoryOfRank, contents: ContentsOfRank) -> int:
    """Return the allocator's peak in a step before which it has what live storages take."""
    return memory.peak - (memory.before - contents.before)


def resident(peer: Peer, case: Case, rank: int) -> int:
    """Return the bytes of parameters that lie on a rank between steps, which no peak counts; 0 of shards."""
    if peer.sharded:
        return 0
    stages = own_stages(rank, case) if peer.kind == "pipeline" else range(case.n)
    own = copied_stages(build_training(case), stages, torch.device("cpu"))
    return sum(parameter.nbytes for parameter in nn.ModuleList(own.values()).parameters())


def _device_peak(peer: Peer, case: Case, rank: int, measured: Measurements) -> DevicePeak:
    memory, contents = measured.memory[rank], measured.contents[rank]
    base = resident(peer, case, rank)
    return DevicePeak(
        device=rank,
        parameters=base,
        bytes=measured_peak(memory, contents) - base,
        contents=contents.at_peak,
        in_no_storage=measured_peak(memory, contents) - contents.peak,
        unseen=unseen(memory, contents),
        tasks=[*memory.tasks],
        task_bytes=[peak - base for peak in memory.tasks.values()],
    )


def simulate_anew(report: PeerReport) -> PeerReport:
    """Return a report with the simulation of today beside its measurements."""
    peer, asked = PEERS[report.name], report.request
    sizes = tuple(asked.sizes.items())
    case = Workload(report.ranks, asked.m, asked.model, sizes, asked.batch, asked.device, asked.dtype).case(peer)
    said = {runtime: predict_peer(peer, case, runtime) for runtime in RUNTIMES}
    devices = [_with_simulations(device, said) for device in report.devices]
    judging = RUNTIMES[-1]
    devices = [
        structs.replace(own, remainder=peer.remainder_of_rank(case, own.device, own.simulated[judging].bytes))
        for own in devices
    ]
    messages = compare_messages(peer, report.messages.torch, said[judging].calls)
    remainder = peer.remainder(case)
    if any(left_over(device, remainder) > TOLERANCE * device.bytes for device in devices):
        beside = workspaces_beside(peer, case, said[judging])
        devices = [structs.replace(own, remainder=own.remainder | beside[own.device]) for own in devices]
    within = all(is_tolerated(device, remainder) for device in devices)
    apart = report.max_abs_difference
    good = within and messages.same and apart is not None and apart <= PARAMETER_TOLERANCES[case.device]
    return structs.replace(report, devices=devices, messages=messages, remainder=remainder, ok=good)


def is_tolerated(device: DevicePeak, remainder: dict[str, int]) -> bool:
    """Return whether a rank's simulation, with what is named, is as close as is tolerated."""
    return abs(left_over(device, remainder)) <= TOLERANCE * device.bytes


def workspaces_beside(peer: Peer, case: Case, said: Prediction) -> list[dict[str, int]]:
    """Return by how much the kernels of each rank's tasks, run apart here, raise its simulated peak, if they do."""
    taken = workspaces_of_stages(build_training(case))
    peaks = predict_peer(peer, case, RUNTIMES[-1], taken).peaks
    raised = [peak - without for peak, without in zip(peaks, said.peaks, strict=True)]
    return [{"workspaces of kernels": size} if size else {} for size in raised]


def left_over(device: DevicePeak, remainder: dict[str, int]) -> int:
    """Return the bytes of torch's peak that neither the judged simulation nor a named remainder has."""
    return (
        device.bytes - device.simulated[RUNTIMES[-1]].bytes - sum(chain(remainder.values(), device.remainder.values()))
    )


def _with_simulations(device: DevicePeak, said: dict[str, Prediction]) -> DevicePeak:
    """Return a rank's memory with the peaks of simulations, and of its tasks in them; those of other names stay."""
    rank, base = device.device, device.parameters
    simulated = {name: own for name, own in device.simulated.items() if name not in said}
    simulated |= {
        runtime: SimulatedMemory(
            bytes=own.peaks[rank] - base,
            relative_error=relative_error(own.peaks[rank] - base, device.bytes),
            categories=own.parts[rank],
            tasks=[
                None if peak is None else peak - base
                for peak in (task_peak(own.tasks[rank], name) for name in device.tasks)
            ],
        )
        for runtime, own in said.items()
    }
    return structs.replace(device, simulated=simulated)


def task_peak(tasks: dict[str, int], name: str) -> int | None:
    """Return the simulated peak of a task of torch's, whose whole backward may be two tasks of the simulation."""
    kind, _, rest = name.partition(" ")
    parts = ("B", "I", "W") if kind == "B" else (kind,)
    return max((tasks[f"{part} {rest}"] for part in parts if f"{part} {rest}" in tasks), default=None)


def compare_messages(peer: Peer, torchs: Sequence[list[Call]], ours: Sequence[list[Call]]) -> Messages:
    """Compare a pipeline's sends one by one in each rank's order, collectives that torch cuts alike in any order.

    Of other collectives the bytes are compared. A reduce-scatter counts as all that it sums, of which each rank's call
    has a share.
    """
    shares = {"reduce-scatter": len(torchs)}
    sizes = [[sum(call.nbytes * shares.get(call.call, 1) for call in own) for own in each] for each in (torchs, ours)]
    order = sorted if peer.cut_alike else list
    rows = [(order(made), order(own)) for made, own in zip(torchs, ours, strict=True)]
    if peer.kind == "pipeline" or peer.cut_alike:
        differences = [_first_difference(rank, *row) for rank, row in enumerate(rows) if row[0] != row[1]]
    else:
        totals = enumerate(zip(*sizes, strict=True))
        differences = [f"rank {rank}: torch {made} B, simulated {own} B" for rank, (made, own) in totals if made != own]
    return Messages(
        torch=list(torchs),
        simulated=sum(map(len, ours)),
        bytes_torch=sum(sizes[0]),
        bytes_simulated=sum(sizes[1]),
        first_difference=next(iter(differences), None),
    )


def _first_difference(rank: int, made: list[Call], ours: list[Call]) -> str:
    k, *calls = next((k, *pair) for k, pair in enumerate(zip_longest(made, ours)) if pair[0] != pair[1])
    words = [f"{call.label or call.call} to {call.peer}, {call.nbytes} B" if call else "nothing" for call in calls]
    return f"rank {rank}, message {k}: torch {words[0]}, simulated {words[1]}"
