"""The tracker against plain bookkeeping, against the allocator's own counter, and fake tensors against real ones."""

import sys
from itertools import accumulate
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from cdpsim.program import Category
from validation.peers.measure import Observer
from validation.profile.tracker import Tracker, is_alive, storage_of
from validation.training.models import make_architecture

MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.ReLU()), (8, 32)),
    "transformer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True), (3, 7, 32)),
}
every_model = pytest.mark.parametrize("model", MODELS)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 40)),
        st.tuples(st.sampled_from(("view", "detach", "in place", "drop", "ignore")), st.integers(0, 99)),
        st.tuples(st.just("resize"), st.integers(0, 99)),
        st.tuples(st.sampled_from([*Category]), st.integers(0, 99)),
    ),
    max_size=60,
)


@given(steps)
@settings(deadline=None)
def test_it_counts_what_a_plain_book_counts(steps: list[tuple[object, int]]) -> None:
    """Each tensor with the number of its storage; of each storage its bytes and category, until no tensor has it."""
    tracker = Tracker()
    tensors: list[tuple[torch.Tensor, int]] = []
    sizes: dict[int, int] = {}
    categories: dict[int, Category] = {}
    ignored: set[int] = set()
    for number, (what, which) in enumerate(steps):
        with tracker:
            if what == "allocate":
                tensors.append((torch.empty(which), number))
                sizes[number], categories[number] = 4 * which, Category.ACTIVATIONS
            elif tensors:
                tensor, storage = tensors[which % len(tensors)]
                if what == "view":
                    tensors.append((tensor[: which % 3], storage))
                elif what == "detach":
                    tensors.append((tensor.detach(), storage))
                elif what == "in place":
                    tensor.add_(1)
                elif what == "drop":
                    tensors.pop(which % len(tensors))
                elif what == "resize":
                    tensor.resize_(which)
                    sizes[storage] = max(sizes[storage], 4 * which)  # what is smaller keeps its memory
                elif what == "ignore":
                    tracker.ignore([tensor])
                    ignored.add(storage)
                elif isinstance(what, Category):
                    tracker.label(tensor, what)
                    categories[storage] = what
                del tensor
        alive = {storage for _, storage in tensors} - ignored
        levels = dict.fromkeys(Category, 0)
        for storage in alive:
            levels[categories[storage]] += sizes[storage]
        assert tracker.levels() == levels
        assert tracker.level == sum(levels.values())


def peak_of(numbers: list[int]) -> int:
    """The highest that they sum up to on the way."""
    return max(accumulate(numbers), default=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
@settings(deadline=None)
def test_peaks_are_the_highest_levels_since_they_were_reset(sizes: list[int]) -> None:
    """Every other tensor is dropped at once; the others stay, as gradients."""
    with Tracker() as tracker:
        base = torch.empty(1000)
        before = torch.empty(100)
        tracker.label(base, Category.PARAMETERS)
        del before
        tracker.reset_peak()
        kept = []
        changes = [4000]
        for size in sizes:
            kept.append(torch.empty(size))
            torch.empty(2 * size)
            tracker.label(kept[-1], Category.GRADIENTS)
            changes += [4 * size, 8 * size, -8 * size]
        assert tracker.peak == peak_of(changes)
        peaks = tracker.peaks()
    assert peaks[Category.PARAMETERS] == 4000
    assert peaks[Category.GRADIENTS] == 4 * sum(sizes)
    assert peaks[Category.ACTIVATIONS] == 12 * max(sizes)
    assert peaks[Category.OPTIMIZER] == 0


def forward_and_backward(module: nn.Module, x: torch.Tensor) -> None:
    """Where gradients are made, nothing else stays."""
    module(x).square().mean().backward()


def changes_in(profiler: Any) -> list[int]:
    """Return the bytes that the allocator gave and took back, in order."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@every_model
def test_it_equals_the_counter_of_the_allocator(model: str) -> None:
    """The remaining bytes and the peak of a forward and backward."""
    make, shape = MODELS[model]
    module, x = make(), torch.randn(shape)
    forward_and_backward(module, x)  # the first time, torch makes things that it keeps
    module.zero_grad()
    tracker = Tracker()
    tracker.ignore([x, *module.parameters()])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, tracker:
        forward_and_backward(module, x)
    changes = changes_in(profiler)
    assert len(changes) > 20
    assert (tracker.level, tracker.peak) == (sum(changes), peak_of(changes))
    module.zero_grad()
    assert tracker.level == 0


@every_model
def test_fake_tensors_count_as_real_ones(model: str) -> None:
    found = []
    make, shape = MODELS[model]
    for fake in (False, True):
        with FakeTensorMode() if fake else torch.random.fork_rng(devices=[]):
            module, x = make(), torch.randn(shape)
            tracker = Tracker()
            tracker.ignore([x, *module.parameters()])
            with tracker:
                forward_and_backward(module, x)
            found.append((tracker.level, tracker.peak))
    assert found[0] == found[1]
    assert found[0][1] > found[0][0] > 0


def test_what_no_operation_made_counts_when_it_is_shown() -> None:
    tensor = torch.ones(5)
    with Tracker() as tracker:
        assert tracker.level == 0
        tracker.see([tensor, tensor[1:]])
        assert tracker.level == 20
        del tensor
        assert tracker.level == 0


def test_a_storage_that_grows_is_made_anew_before_the_old_one_goes() -> None:
    """As the allocator does it."""
    with Tracker() as tracker:
        tensor = torch.empty(10)
        tensor.resize_(15)
        assert (tracker.level, tracker.peak) == (60, 100)


def test_a_storage_that_a_graph_keeps_is_alive() -> None:
    """Tanh keeps its result, a sum keeps nothing."""
    x = torch.ones(3, requires_grad=True)
    kept, let_go = torch.tanh(x), x + 1
    graph = kept.sum() + let_go.sum()
    storages = storage_of(kept), storage_of(let_go)
    del kept, let_go
    assert [is_alive(storage) for storage in storages] == [True, False]
    del graph
    assert not is_alive(storages[0])


def test_storages_may_end_in_another_thread() -> None:
    """As those that gloo's threads have sent; what there is can be asked for, and no level is lost."""
    observer = Observer(torch.device("cpu"))
    storages = [torch.empty(3) for _ in range(20_000)]
    with observer:
        observer.see(storages)
    assert observer.level == 12 * 20_000

    def end() -> None:
        while storages:
            storages.pop()

    thread, interval = Thread(target=end), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            observer.kinds()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert observer.level == 0 and observer.kinds() == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit-b16", "resnet50"])
def test_kernels_of_convolutions_take_more_than_storages(name: str) -> None:
    """Scratch memory of oneDNN, unseen by trackers, is a few per cent of a large model's peak, and below ten."""
    pytest.importorskip("transformers")
    layers, inputs, targets, loss, *_ = make_architecture(name, 1, batch=2, dtype=torch.float32)
    net, x, target = nn.Sequential(*layers), inputs(0), targets(1)
    tracker = Tracker()
    tracker.ignore([x, target, *net.parameters(), *net.buffers()])
    with tracker:
        torch.autograd.backward(loss(net(x), target))
    net.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.autograd.backward(loss(net(x), target))
    allocated = peak_of(changes_in(profiler))
    assert tracker.peak <= allocated < 1.1 * tracker.peak
