"""CUDA's autocast on fake tensors of a CPU, against torch's own lists: its header's, and those of its tests."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cdpsim import RequestError
from validation.profile.command import profile, refuse_unfit_layers
from validation.profile.footprints import profile_stages
from validation.training.autocast import autocast_as_cuda
from validation.training.models import make_training
from validation.training.optimizer import Optimizer

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
HALF, FULL = torch.float16, torch.float32
PLACES = (torch, torch._C._nn, vars(torch._C)["_linalg"], Tensor)
Check = tuple[str, Callable[[], Any], torch.dtype]  # an operator, a call of it, and the type of its result


def ones(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def _halved(x: Tensor) -> Tensor:
    return x.half() if x.is_floating_point() else x


def torchs_checks() -> list[Check]:
    """Return those of torch's tests on GPUs; what is cast is in the other type, in both, or in half alone."""
    needed = "torch.testing._internal.common_utils"  # of which the lists take two names, and which needs a package more
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, needed, SimpleNamespace(TEST_WITH_ROCM=True, TestCase=object))
        from torch.testing._internal.autocast_test_lists import AutocastTestLists
    lists = AutocastTestLists("cpu")
    checks: list[Check] = []
    for kind, dtype in {"fp16": HALF, "fp32": FULL, "need_autocast_promote": FULL}.items():
        for place in ("torch", "nn", "linalg", "methods"):
            for name, given, *more in getattr(lists, f"{place}_{kind}", []):
                if more == [True] or name == "einsum":  # cuDNN's, and one whose arguments do not fit each other
                    continue
                call = next(getattr(home, name) for home in PLACES if hasattr(home, name))
                checks.append((name, partial(call, *given, **(more[0] if more else {})), dtype))
                if kind == "need_autocast_promote":
                    checks.append((name, partial(call, *tree_map_only(Tensor, _halved, given)), HALF))
    return checks


def more_checks() -> list[Check]:
    """Return those of operators that torch's tests leave out."""
    a, b, image = ones(2, 3, dtype=FULL), ones(4, 3, dtype=FULL), ones(1, 1, 4, 4)
    head = ones(1, 2, 4, 8, dtype=FULL)
    volumes = {1: ones(1, 1, 4), 2: image, 3: ones(1, 1, 4, 4, 4)}
    resized = [(f"upsample_nearest{d}d", "nearest", x, False) for d, x in volumes.items()]
    resized += [(f"_upsample_nearest_exact{d}d", "nearest-exact", x, False) for d, x in volumes.items()]
    resized += [
        ("upsample_linear1d", "linear", volumes[1], False),
        ("upsample_trilinear3d", "trilinear", volumes[3], False),
    ]
    for mode in ("bilinear", "bicubic"):
        resized += [(f"upsample_{mode}2d", mode, image, False), (f"_upsample_{mode}2d_aa", mode, image, True)]
    calls: list[tuple[str, Callable[[], Any]]] = [
        (name, partial(functional.interpolate, x, scale_factor=2, mode=mode, antialias=smooth))
        for name, mode, x, smooth in resized
    ]
    calls += [
        ("huber_loss", lambda: functional.huber_loss(ones(3), ones(3))),
        ("native_layer_norm", lambda: torch.native_layer_norm(ones(2, 3), [3], None, None, 1e-5)[0]),
        ("frobenius_norm", lambda: torch.frobenius_norm(ones(2, 3), [0, 1])),
        ("nuclear_norm", lambda: torch.nuclear_norm(ones(2, 3))),
        ("linalg_vector_norm", lambda: torch.linalg.vector_norm(ones(3))),
        ("linalg_matrix_norm", lambda: torch.linalg.matrix_norm(ones(2, 3))),
        ("norm", lambda: torch.ops.aten.norm.Scalar(ones(3), 1)),
        ("norm", lambda: torch.ops.aten.norm.ScalarOpt_dim(ones(3), 1, [0])),
    ]
    return [
        *((name, call, FULL) for name, call in calls),
        ("einsum", lambda: torch.einsum("ij,kj->ik", a, b), HALF),
        ("scaled_dot_product_attention", lambda: functional.scaled_dot_product_attention(head, head, head), HALF),
        ("pow", lambda: 2.0 ** ones(3), FULL),
        ("sum", lambda: ones(3).sum(dtype=HALF), HALF),
        ("exp", lambda: ones(3, dtype=torch.float64).exp(), torch.float64),
    ]


CHECKS = [*torchs_checks(), *more_checks()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "call", "dtype"), CHECKS, ids=[name for name, *_ in CHECKS])
def test_results_have_the_type_that_cudas_list_gives(name: str, call: Callable[[], Any], dtype: torch.dtype) -> None:
    """The first takes seconds, in which torch loads what fake tensors need."""
    with FakeTensorMode(allow_non_fake_inputs=True), autocast_as_cuda("cpu", HALF):
        found = call()
    assert {each.dtype for each in (found if isinstance(found, tuple) else [found])} == {dtype}


def test_each_operator_of_the_header_has_a_check() -> None:
    """But kernels of CUDA that a CPU does not have."""
    if not HEADER.is_file():
        pytest.skip("this torch came without its headers")
    lists = re.findall(r"#define AT_FORALL_(LOWER|FP32|PROMOTE)\w*\(_\) *\\\n((?:.*\\\n)*.*)", HEADER.read_text())
    assert len(lists) == 4
    checked = {"LOWER": HALF, "FP32": FULL, "PROMOTE": FULL}
    for kind, names in lists:
        known = {name for name, _, dtype in CHECKS if dtype == checked[kind]}
        left = set(re.findall(r"_\((\w+)", names)) - known
        assert left <= {"_scaled_dot_product_flash_attention", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}


class _Count(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def casts(run: Callable[[], object]) -> int:
    with _Count() as count, autocast_as_cuda("cpu", HALF):
        run()
    return count.calls["_to_copy"]


def test_a_weight_is_cast_once_in_a_context() -> None:
    """Weight and bias once each, data each time, and what is no leaf, too."""
    layer, x = nn.Linear(4, 4), ones(2, 4, dtype=FULL)
    assert casts(lambda: [layer(x) for _ in range(3)]) == 2 + 3
    assert casts(lambda: [functional.linear(x, layer.weight * 1) for _ in range(3)]) == 3 + 3


def test_parts_of_an_operator_are_not_cast() -> None:
    """Attention takes two bytes a number, the softmax in it, too."""
    head = ones(1, 2, 4, 8).requires_grad_()
    assert casts(lambda: functional.scaled_dot_product_attention(head, head, head)) == 0


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize(("dtype", "copies"), [(HALF, 0), (torch.bfloat16, 1)])
def test_softmax_of_halves_needs_no_copy_of_them(softmax: Any, dtype: torch.dtype, copies: int) -> None:
    """CUDA's kernel reads halves and writes float32, and back; other types are cast before it (torch's SoftMax.cpp)."""
    with FakeTensorMode():
        x = ones(2, 3, dtype=dtype).requires_grad_()
        assert casts(lambda: torch.autograd.backward(softmax(x, -1), ones(2, 3, dtype=FULL))) == 2 * copies
    assert x.grad is not None and x.grad.dtype == dtype


class _Gelu(nn.Module):
    """The activation function of GPT-2 after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))


def kept(context: Any) -> Counter[torch.dtype]:
    """Return the numbers that the graph of a forward keeps, by their type."""
    found: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda x: found.setdefault(x.untyped_storage()._cdata, x), lambda x: x), context:
        _Gelu()(torch.ones(2, 4)).sum()
    return sum((Counter({x.dtype: x.numel()}) for x in found.values() if x.shape == (2, 16)), Counter())


def test_gelu_keeps_three_tensors_in_float32() -> None:
    """The input of pow, its tanh, and 1 + tanh; a CPU keeps these, too, in two bytes."""
    numbers = 2 * 16
    low = torch.bfloat16
    assert kept(autocast_as_cuda("cpu", low)) == {FULL: 3 * numbers, low: numbers}
    assert kept(torch.autocast("cpu", low)) == {low: 4 * numbers}


def gelu_model(batch: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    return [_Gelu()], torch.ones(batch, 4), torch.ones(batch, 16)


@pytest.mark.parametrize(("model", "more"), [("mlp", 0), (f"{__name__}:gelu_model", 6 * 2 * 16)])
def test_profiles_take_cudas_list_and_replays_a_cpus(model: str, more: int) -> None:
    """They are the same for an MLP; GPT-2's activation function keeps 6 B a number more, as measured on an H100."""
    found = profile(model, 1, batch=2, autocast="bf16").model.stages[0].activation
    training = make_training(model, 1, batch=2, dtype=FULL, autocast="bf16")
    assert found - profile_stages(training, Optimizer()).stages[0].activation == more


def test_what_cuda_refuses_is_one_line() -> None:
    probability = ones(3, dtype=FULL)
    with (
        pytest.raises(RequestError, match=r"mine:net: its layers .*take binary_cross_entropy_with_logits"),
        refuse_unfit_layers("mine:net"),
        autocast_as_cuda("cpu", HALF),
    ):
        functional.binary_cross_entropy(probability, probability)
