"""Curves of memory, against whole models that torch runs in one piece, followed here operation by operation."""

import re
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import Model
from cdpsim.studies.superpose import superpose, worker_curve
from validation.profile.command import profile, profile_command
from validation.profile.curves import Recorder
from validation.program import serve_harness
from validation.training.models import make_architecture

MODELS = ["resnet-mini", "vit-mini", "llama-mini"]


class Followed(TorchDispatchMode):
    """The FLOP of each operation by torch's own table, and the bytes of all storages alive at its end."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        super().__init__()
        self.others = {tensor.untyped_storage()._cdata for tensor in others}
        self.alive: list[tuple[Any, int]] = []
        self.rows: list[tuple[int, int]] = []

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = {each._cdata for each, _ in ((reference(), size) for reference, size in self.alive) if each is not None}
        if storage._cdata not in self.others | known:
            self.alive.append((ref(storage), storage.nbytes()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        self.alive = [(reference, size) for reference, size in self.alive if reference() is not None]
        count = flop_registry.get(func._overloadpacket)
        work = 0 if count is None else int(count(*args, **(kwargs or {}), out_val=result))
        self.rows.append((work, sum(size for _, size in self.alive)))
        return result


def in_one_piece(name: str, *, fresh: bool = False, **sizes: Any) -> list[tuple[int, int]]:
    """Run a real model forward and backward; each operation's FLOP, and the bytes alive then but for the input.

    Gradients of parameters are there from the beginning and do not count, so that autograd adds to them; or autograd
    makes them, and they count: `fresh`. Three differences are known: torch keeps the loss' own gradient, of 4 bytes, to
    the end of the backward, a caller its target, and in a model of stages each pass has a FLOP at least.
    """
    model = make_architecture(name, 1, batch=2, dtype=torch.float32, **sizes)
    net = nn.ModuleList(model.layers)
    for parameter in net.parameters():
        parameter.grad = None if fresh else torch.zeros_like(parameter)
    h = model.inputs(0)
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    ends: list[int] = []  # of each layer's forward, then of the backwards from the last layer's on
    targets: list[torch.Tensor] = []  # the last layer's own, until its backward is over

    def end_backward(_: torch.Tensor) -> None:
        ends.append(len(followed.rows))
        targets.clear()

    with Followed([h, *net.parameters(), *gradients, *net.buffers()]) as followed:
        rows = followed.rows
        for layer in net[:-1]:
            h = layer(h)
            h.register_hook(end_backward)
            ends.append(len(rows))
        targets.append(model.targets(1))
        followed.see(targets[0])
        loss = model.loss(net[-1](h), targets[0]) / 1
        ends.append(len(rows))
        edge = get_gradient_edge(loss)
        del h, loss
        torch.autograd.backward(edge)
        ends.append(len(rows))
    work, held = (np.array(column) for column in zip(*rows, strict=True))
    held[ends[len(net)] :] -= 4
    for begin, end in pairwise([0, *ends]):
        if not work[begin:end].any():
            work[begin + held[begin:end].argmax()] = 1
    return list(zip(work.tolist(), held.tolist(), strict=True))


def together(rows: list[tuple[int, int]], n: int) -> int:
    """The most that n workers hold, each 1/n of the FLOP behind the one before: all looked up, whenever one changes."""
    work, held = (np.array(column) for column in zip(*rows, strict=True))
    span = n * int(work.sum())
    begin = (n * (work.cumsum() - work)) % span  # an operation without FLOP at the end is at the next pass's begin
    places = np.unique(begin)
    moment = np.array([held[begin == place].max() for place in places])
    lasting = np.array([held[(begin == place) & (work > 0)].max(initial=-1) for place in places])
    at = (places[:, None] + np.arange(n) * (span // n)) % span
    k = np.searchsorted(places, at, side="right") - 1
    return int(np.where(places[k] == at, moment[k], lasting[k]).sum(axis=1).max())


@cache
def profiled(name: str) -> Model:
    pytest.importorskip("transformers")
    return profile(name, batch=2, by_operator=True, **sizes_of(name)).model


def sizes_of(name: str) -> dict[str, Any]:
    """Torch's table has no FLOP of the kernel for attention on a CPU."""
    return {} if name == "resnet-mini" else {"attention": "eager"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_superposed_workers_are_those_of_a_real_run_in_one_piece(name: str) -> None:
    """To the byte: what one worker holds at most, and N of them, from operations that this file follows by itself."""
    model = profiled(name)
    rows = in_one_piece(name, **sizes_of(name))
    assert superpose(model, 1).dp == max(held for _, held in rows)
    assert sum(work for work, _ in rows) == worker_curve(model).duration.sum()
    for n in (3, 8):
        assert superpose(model, n).cdp == Fraction(together(rows, n), n)
    rows, given = in_one_piece(name, fresh=True, **sizes_of(name)), model.stages[0].data
    for n in (1, 3, 8):
        assert superpose(model, n, contents="gradients").cdp == given + Fraction(together(rows, n), n)


@pytest.mark.slow
def test_cuts_do_not_change_what_workers_hold() -> None:
    """Layers one by one or some together: the operations are the same.

    The target and the loss' own gradient, of 4 bytes, are there until the backward of the last stage is over.
    """
    coarse = profile("vit-mini", partition="3,6", batch=2, by_operator=True, attention="eager").model
    for axis in ("flops", "roofline:a100"):
        wide, fine = (superpose(model, 8, axis=axis) for model in (coarse, profiled("vit-mini")))
        longer = 4 + 2 * 8
        assert 0 <= wide.dp - fine.dp <= longer
        assert 0 <= wide.cdp - fine.cdp <= longer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_measured_curves_have_times_of_the_same_steps(name: str) -> None:
    """Each step takes some nanoseconds, and a stage as long as its steps; bytes are those of fake tensors."""
    fake, real = (profile(name, 2, by_operator=True, measured=measured).model for measured in (False, True))
    assert [(stage.weight_backward, stage.attention_forward) for stage in real.stages] == [(None, None)] * 2
    for wanted, found in zip(fake.stages, real.stages, strict=True):
        for name in ("forward", "backward"):
            expected, steps = (getattr(stage.curve, name) for stage in (wanted, found))
            assert (steps.held, steps.moved) == (expected.held, expected.moved)
            assert (steps.input_steps, steps.gradient_steps) == (expected.input_steps, expected.gradient_steps)
            assert min(steps.cost) > 0
            cost = getattr(found, name)
            assert not isinstance(cost, Work)
            assert 0 < cost == pytest.approx(sum(steps.cost) / 1e9)
    assert superpose(real, 1, axis="measured").dp == superpose(fake, 1).dp
    with pytest.raises(RequestError, match="is a time, which is not what axis 'flops' goes by"):
        superpose(real, 2)


def test_the_command_writes_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of work or of times, in a file that says it; times alone are refused."""

    def serve(*words: str) -> int:
        return serve_harness([profile_command], ["profile", "mlp", *words])

    for words, unit in (([], "FLOP"), (["--measured"], "s")):
        file = tmp_path / f"{unit}.toml"
        assert serve("-n", "2", "--by-operator", *words, "-o", str(file)) == 0
        assert re.search(rf"\d [munkM]?{unit} ", capsys.readouterr().out)
        assert all(stage.curve for stage in Model.load(file).stages)
    with pytest.raises(RequestError, match="measured: times are those of operations; add --by-operator"):
        serve("-n", "2", "--measured", "-o", str(tmp_path / "x.toml"))
    assert not (tmp_path / "x.toml").exists()


def test_an_operation_moves_what_it_reads_and_writes() -> None:
    """A product and its bias, by hand; a view and an allocation move nothing, a tensor given twice is read once."""
    x, weights, bias = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5)
    recorder = Recorder()
    with recorder:
        product = x @ weights
        product += bias
        product.t().expand(2, 5, 3)
        torch.empty(100)
        x * x
        bias.expand(1000, 5).sum()
    moved = [operation.moved for operation in recorder.take()]
    assert moved == [4 * (12 + 20 + 15), 4 * (15 + 5 + 15), 0, 0, 0, 4 * (12 + 12), 0, 4 * (5 + 1)]
