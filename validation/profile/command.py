"""The work and the memory of a model's layers and stages, found without a GPU and without weights, as a model file.

Everything runs on fake tensors: they have shapes, types and storages, but no values. Storages alive are counted to the
byte; operations (FLOP) as torch counts them: two for each multiplication with its addition, none for operations
other than products of matrices, and causal attention as if it were not causal.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from msgspec.structs import replace
from quantiphy import Quantity

from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.files import tables
from cdpsim.files import writing as files
from cdpsim.files.units import Work
from cdpsim.model import Cuts, Model, Recipe, Stage

from ..program import harness_command
from ..training.autocast import autocast_as_cuda
from ..training.models import AUTOCAST, make_architecture
from ..training.optimizer import OPTIMIZERS, Optimizer
from ..training.passes import SPLITS, Split
from ..training.stages import Architecture, Training, cut, separate_layers
from .curves import with_curves, with_timed_curves
from .cuts import find_cuts
from .footprints import is_block, profile_stages
from .ties import tie_stages
from .whole import WholeStep, whole_step

PRECISIONS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
TYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


_PASSED = (
    *("partition", "dtype", "optimizer", "mixed_precision", "autocast", "float32_loss", "split", "device"),
    *("by_operator", "measured"),
)


class Profile(NamedTuple):
    """A model's stages, the layers of each, and how to run a training step of the whole model in one piece."""

    model: Model
    cuts: Cuts
    layers: int
    optimizer: Optimizer  # of the step
    run_whole: Callable[[], WholeStep]


def profile(
    model: str,
    n: int | None = None,
    *,
    partition: str | None = None,
    batch: int = 4,
    dtype: str = "float32",
    optimizer: str | None = None,
    mixed_precision: bool = False,
    autocast: str | None = None,
    float32_loss: bool = False,
    split: str | None = None,
    device: str = "cpu",
    by_operator: bool = False,
    measured: bool = False,
    ready: Callable[[], object] = lambda: None,
    **sizes: Any,
) -> Profile:
    """Profile the stages of a partition, or each layer as one; `sizes` are parameters of the model, such as length.

    With `float32_loss`, the loss is of the output in float32, as the losses of transformers are.
    With `mixed_precision`, the model's recipe has the optimizer, and stages do not. Without an `optimizer`, the recipe
    of a language model has Adam, in mixed precision if numbers have two bytes; other models have sgd. `split` says how
    often the parts of a split backward go through a stage. With `by_operator`, stages have curves of their memory, and
    with `measured` times of their operations. `ready` is called when the request has been checked.
    """
    kind, named = TYPES[choose("dtype", dtype, TYPES)], choose("optimizer", optimizer or "sgd", OPTIMIZERS)
    if mixed_precision:
        check_mixed(dtype)
    how = cast(Split, choose("split", split or "once", SPLITS))
    check_profile_device(device)
    if measured and not by_operator:
        raise RequestError("measured", "times are those of operations; add --by-operator, or leave it out")
    with refuse_unfit_layers(model):
        architecture = separate_layers(
            without_weights(model, n or 1, batch=batch, dtype=kind, autocast=autocast, **sizes)
        )
        if autocast is not None:  # for training on CUDA, wherever it is profiled
            architecture = architecture._replace(autocast=partial(autocast_as_cuda, dtype=AUTOCAST[autocast]))
        if float32_loss:
            given = architecture.loss
            architecture = architecture._replace(loss=lambda output, target: given(output.float(), target))
        count = len(architecture.layers)
        if architecture.checkpointed and (n, partition) != (None, None):
            problem = "some of its layers are checkpointed, so each is a stage; leave -n out, commands group layers"
            raise RequestError(model, problem)
        recipe = _recipe(architecture, kind, optimizer, mixed_precision)
        own = OPTIMIZERS["sgd" if recipe.optimizer else named]
        if n is None and partition is None:
            cuts: Cuts = tuple(range(1, count))
        else:
            cuts = find_cuts(architecture, n, partition or "flops", own, device)
        ready()
        training = cut(architecture, cuts, device=device)
        found = tie_stages(profile_stages(training, own, how), training, own)
        names = [architecture.name_of(*ends) for ends in pairwise((0, *cuts, count))]
        rows = zip(found.stages, names, _checkpoints(architecture, training, found), strict=True)
        found = replace(found, stages=tuple(replace(each, name=own, recomputes=yes) for each, own, yes in rows))
        if by_operator:
            found = (with_timed_curves if measured else with_curves)(found, training)
        trained = OPTIMIZERS[recipe.optimizer or named]
        if recipe.mixed_precision:
            trained = dataclasses.replace(trained, mixed_precision=True)
    state = bool(found.size("optimizer").any())
    added = [f"autocast {autocast}"] * bool(autocast) + [named] * state  # as a recipe adds it to a name
    name = ", ".join([model[:100], *added])
    found = replace(
        found, name=name, precision=PRECISIONS[dtype], samples=batch, tokens=_tokens(architecture), training=recipe
    )
    return Profile(found, cuts, count, trained, partial(whole_step, architecture, trained, device))


def _checkpoints(architecture: Architecture, training: Training, found: Model) -> list[bool]:
    """Return of each stage whether it recomputes: layers that a model names, or all that are blocks."""
    if architecture.checkpointed:
        return [k in architecture.checkpointed for k in range(found.n)]
    several = found.n < len(architecture.layers)
    return [several or is_block(training, found.stages, k) for k in range(found.n)]


def _recipe(architecture: Architecture, kind: torch.dtype, optimizer: str | None, mixed_precision: bool) -> Recipe:
    """Return the recipe in a profile's file; without an optimizer where stages have its state."""
    recompute = "layer" if architecture.checkpointed else "none"
    if optimizer is None and _tokens(architecture) is not None:
        return Recipe(optimizer="adam", mixed_precision=kind.itemsize == 2, recompute=recompute)
    named = (optimizer or "sgd") if mixed_precision else None
    return Recipe(optimizer=named, mixed_precision=mixed_precision, recompute=recompute)


def _tokens(architecture: Architecture) -> int | None:
    """Return the tokens of a sample, where an input is rows of them; None of other models."""
    form, classes = architecture.inputs
    return form.shape[1] if classes and len(form.shape) == 2 else None


def check_mixed(dtype: str) -> None:
    """Refuse mixed precision of numbers other than of two bytes."""
    if TYPES[dtype].itemsize != 2:
        problem = f"keeps the weights of a model of two bytes a number in float32 as well; {dtype} has another width"
        raise RequestError("mixed_precision", f"{problem}, take --dtype bfloat16 or float16")


@contextmanager
def refuse_unfit_layers(model: str) -> Iterator[None]:
    """Turn torch's errors about layers and sizes that do not fit each other into refusals in one line."""
    try:
        yield
    except RequestError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RequestError(model, f"its layers do not run ({reason}); check them, and the sizes") from error


def check_profile_device(device: str) -> None:
    """Refuse a device that does not exist: a fake tensor on it would end the process."""
    if choose("device", device, ("cpu", "cuda")) == "cuda" and not torch.cuda.is_available():
        raise RequestError("device", "torch finds no CUDA device here, and fakes none without; take cpu")


def without_weights(
    model: str, n: int, *, batch: int, dtype: torch.dtype, autocast: str | None = None, **sizes: Any
) -> Architecture:
    """Return a model whose parameters have shapes and no values."""
    with torch.device("meta"):
        architecture = make_architecture(model, n, batch=batch, dtype=dtype, autocast=autocast, **sizes)
    for layer in architecture.layers:
        for module in layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return architecture


SIZE = argument("--size", action="append", default=[], metavar="NAME=K", help="a size of the model, such as width=512")
PARTITION = argument(
    "--partition", default="flops", metavar="PARTITION", help="how layers are cut into stages, as for `profile`"
)
SPLIT_BACKWARDS = argument(
    "--split",
    metavar="HOW",
    help="split backwards go through a stage once (default), keeping what weights need, or twice, keeping all",
)
MIXED_PRECISION = argument(
    "--mixed-precision",
    action="store_true",
    help="the optimizer keeps its state and a copy of the parameters in float32 (for bfloat16, float16)",
)


@harness_command(
    "profile",
    argument("model", metavar="MODEL", help="what to profile (see below)"),
    argument("-n", metavar="N", help="stages (default: one for each layer)"),
    argument("--partition", metavar="PARTITION", help="how to cut layers into N stages (default flops)"),
    argument("--batch", default="4", metavar="B", help="samples of a micro-batch (default 4)"),
    argument("--dtype", default="float32", metavar="TYPE", help=f"{', '.join(TYPES)} (default float32)"),
    argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default sgd, adam of language)"),
    MIXED_PRECISION,
    argument(
        "--autocast", metavar="TYPE", help="bf16 or fp16: forwards under CUDA's torch.autocast, of a float32 model"
    ),
    argument("--float32-loss", action="store_true", help="losses are of outputs in float32, as in transformers"),
    SPLIT_BACKWARDS,
    argument("--device", default="cpu", metavar="NAME", help="whose kernels: cpu (default) or cuda"),
    argument("--attention", metavar="KERNEL", help="sdpa (default) or eager, for models of transformers"),
    argument(
        "--by-operator",
        action="store_true",
        help="write the curve of each stage's memory over its own work, for `cdpsim superpose`",
    ),
    argument(
        "--measured",
        action="store_true",
        help="with --by-operator: run each layer here, and write the times of its operations instead of FLOP",
    ),
    SIZE,
    argument("-o", required=True, metavar="FILE", dest="output", help="the .toml or .json file to write"),
    argument("--force", action="store_true", help="overwrite a file that exists"),
)
def profile_command(options: Namespace) -> int:
    """Write a model's stages as a file for --model, without a GPU and without weights."""
    given: dict[str, Any] = {name: getattr(options, name) for name in _PASSED} | read_sizes(options.size)
    result = profile(
        options.model,
        None if options.n is None else whole_number("n", options.n, at_least=1),
        batch=whole_number("batch", options.batch, at_least=1),
        ready=partial(files.check_writable, options.output, force=options.force),
        **given,
        **({} if options.attention is None else {"attention": options.attention}),
    )
    with refuse_unfit_layers(options.model):
        table = profile_table(result)
    result.model.save(options.output, force=options.force)
    write_stdout(table)
    return 0


def read_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Return the sizes in an option's values, such as "length=512"."""
    sizes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise RequestError(f"size {text!r}", "must be a name and a number, such as length=512")
        if name in ("n", "batch", "dtype", "seed", "device", "cuts", "recompute", "autocast"):
            raise RequestError(f"size {text!r}", f"{name} is no size of a model; see --help-all for its option")
        sizes[name] = whole_number(name, value, at_least=1)
    return sizes


def profile_table(result: Profile) -> str:
    """Return a profile as a table."""
    header = ("stage", "layers", "forward", "backward", "activation", "transients", "boundary", "parameters")
    ends = pairwise((0, *result.cuts, result.layers))
    rows = [
        (str(j), f"{begin}-{end - 1}" if end - begin > 1 else str(begin), *_cells(stage))
        for j, (stage, (begin, end)) in enumerate(zip(result.model.stages, ends, strict=True))
    ]
    peak, allocated, reserved = (_short(nbytes, "B") for nbytes in result.run_whole())
    by = result.optimizer.name + ", mixed precision" * result.optimizer.mixed_precision
    return (
        f"{tables.as_text(header, rows)}\npeak activations of the whole model in one piece: {peak}\n"
        f"its training step on one GPU ({by}): {allocated} allocated at most, {reserved} reserved\n"
    )


def _cells(stage: Stage) -> tuple[str, ...]:
    work = [_short(cost, "FLOP" if isinstance(cost, Work) else "s") for cost in (stage.forward, stage.backward)]
    sizes = stage.activation, stage.forward_transient, stage.backward_transient, stage.boundary, stage.parameters
    activation, ahead, back, *others = (_short(size, "B") for size in sizes)
    return *work, activation, f"{ahead}, {back}", *others


def _short(amount: float, unit: str) -> str:
    return Quantity(amount, unit).render(prec=3)
