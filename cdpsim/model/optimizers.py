"""Optimizers: the bytes of their states, and the bytes that an update reads and writes.

States, in multiples of the weights P that the optimizer updates, in their type:

    sgd 0 · momentum P, the velocity · adam 2 P, two moments (Kingma & Ba 2015, algorithm 1)
    adamw 2 P, the same: its weight decay needs none (Loshchilov & Hutter 2019, algorithm 2)
    lamb 2 P, Adam's moments (You et al. 2020, algorithm 2) · lars P, the velocity (You et al. 2017, algorithm 1)
    lion P, the momentum (Chen et al. 2023, algorithm 2)
    adafactor  for each matrix its row and column sums, for a vector all of it (Shazeer & Stern 2018, algorithm 4;
               without its optional momentum), which only a profile can tell: `Stage.factored`. Of a tensor of more
               dimensions, the last two are rows and columns of many matrices, as in torch.optim.Adafactor.
    sm3        for each dimension of a tensor as many numbers as it has, for a vector all of it (Anil et al. 2019,
               section 4; without momentum)
    adam-8bit  two moments of 8 bits a number, whatever the type of the weights, and for each block of 256 numbers the
               largest of either in fp32 (Dettmers et al. 2022, section 2; blocks as in bitsandbytes, which keeps
               tensors below 4,096 numbers in fp32)

A stage that says the shapes of its `tensors` has all of these exactly. Otherwise SM3 is taken to keep `Stage.factored`,
which is as much for matrices and vectors and more for the kernels of convolutions; and adam-8bit to have one tensor.

torch keeps 4 bytes for each tensor besides, a count of steps, for adam, adamw and adafactor; they are left out here.

Bytes that an update reads and writes: each tensor once for each pass over it, where a pass ends if a number is needed
that only all of its inputs give. All optimizers read gradients and state, and write state and weights; then

    lars       a pass before for the norms of weights and gradients
    lamb       a pass for the moments and the change's norm, and one for the change, which is made of the moments again
    adafactor  a pass for sums of rows and columns and the weights' norm, one for the change's norm, one for the change

In mixed precision, weights are the master copy, which is read once more and written in the model's type. Gradients that
are copied to fp32 for that are read and written once more; loss scaling (of fp16) reads and writes them (unscale, and
check), clipping reads them for their norm, and reads and writes them. With Adam: 28 + 6 bytes a parameter for fp32
gradients of bf16 weights, 60 for fp16 gradients that are copied, unscaled and clipped.
"""

from collections.abc import Callable, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

Dimensions: TypeAlias = tuple[int, ...]
WIDE = 4  # bytes of a number of the master copy and of the state beside it
_BLOCK = 256  # numbers of adam-8bit that share a largest one in fp32
_LEAST_NARROW = 4096  # numbers of a tensor whose state has 8 bits


class UpdateFacts(NamedTuple):
    """The state that an optimizer keeps, and how many times an update reads or writes its tensors."""

    moments: int = 0  # tensors of its state that have a number for each weight
    sums: Callable[[Dimensions], int] | None = None  # the numbers that it keeps of a tensor in their place
    is_8bit: bool = False
    gradients: int = 1
    state: int = 2
    weights: int = 2

    def state_bytes(self, weights: int, factored: int, width: int, tensors: Sequence[Dimensions]) -> int:
        """Return the bytes of the state of weights of so many bytes, each of `width`, in tensors of these shapes.

        Without shapes, all are one tensor, and sums take `factored` bytes.
        """
        if self.is_8bit:
            numbers = [prod(shape) for shape in tensors]
            return self.moments * (sum(map(_in_8_bits, numbers)) if numbers else _blocks(-(-weights // width)))
        if self.sums:
            return width * sum(map(self.sums, tensors)) if tensors else factored
        return self.moments * weights

    @property
    def is_elementwise(self) -> bool:
        """Whether each weight's update follows from its own numbers alone: of no sum, or norm, of a whole tensor."""
        return self.sums is None and self.weights < 3

    def moved(self, weights: int, gradients: int, state: int) -> int:
        """Return the bytes that an update reads and writes, of tensors of so many bytes."""
        return self.weights * weights + self.gradients * gradients + self.state * state


def _blocks(numbers: int) -> int:
    """Return the bytes of so many numbers of 8 bits, in blocks."""
    return numbers + WIDE * -(-numbers // _BLOCK)


def _in_8_bits(numbers: int) -> int:
    """Return the bytes of a moment of one tensor; small ones are wide."""
    return WIDE * numbers if numbers < _LEAST_NARROW else _blocks(numbers)


def _of_rows_and_columns(shape: Dimensions) -> int:
    """Return the number of rows and columns of a tensor, whose last two dimensions make matrices.

    >>> _of_rows_and_columns((3, 30, 50)), _of_rows_and_columns((50,))
    (240, 50)
    """
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1] if len(shape) > 1 else prod(shape)


UPDATE_FACTS = MappingProxyType(
    {
        "sgd": UpdateFacts(),
        "momentum": UpdateFacts(1),
        "adam": UpdateFacts(2),
        "adamw": UpdateFacts(2),
        "adafactor": UpdateFacts(sums=_of_rows_and_columns, gradients=3, state=4, weights=3),
        "lion": UpdateFacts(1),
        "sm3": UpdateFacts(sums=sum),
        "adam-8bit": UpdateFacts(2, is_8bit=True),
        "lamb": UpdateFacts(2, state=3, weights=3),
        "lars": UpdateFacts(1, gradients=2, weights=3),
    }
)
