"""Optimizers: the bytes of their states, and the bytes that an update reads and writes.

States, in multiples of the weights P that the optimizer updates, in their type:

    sgd 0 · momentum P, the velocity · adam 2 P, two moments (Kingma & Ba 2015, algorithm 1)
    adamw 2 P, the same: its weight decay needs none (Loshchilov & Hutter 2019, algorithm 2)
    lamb 2 P, Adam's moments (You et al. 2020, algorithm 2) · lars P, the velocity (You et al. 2017, algorithm 1)
    lion P, the momentum (Chen et al. 2023, algorithm 2)
    adafactor  for each matrix its row and column sums, for a vector all of it (Shazeer & Stern 2018, algorithm 4;
               without its optional momentum), which only a profile can tell: `Stage.factored`. Of a tensor of more
               dimensions, the last two are rows and columns of many matrices, as in torch.optim.Adafactor.
    sm3        for each matrix a number for each row and column, for a vector all of it (Anil et al. 2019, section 4;
               without momentum): the same `Stage.factored`, which is exact for matrices and vectors. Of a tensor of
               more dimensions, such as the kernel of a convolution, it is more than SM3 keeps.
    adam-8bit  two moments of 8 bits a number, whatever the type of the weights, and for each block of 256 numbers the
               largest of either in fp32 (Dettmers et al. 2022, section 2; blocks as in bitsandbytes). Blocks are
               those of a whole stage; tensors below 4,096 numbers, which bitsandbytes keeps in fp32, are not told.

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

from types import MappingProxyType
from typing import NamedTuple

_BLOCK = 256  # numbers of adam-8bit that share a largest one in fp32


class UpdateFacts(NamedTuple):
    """What an optimizer keeps, and how many times an update reads or writes its tensors."""

    tensors: int = 0  # of its state that have a number for each weight
    is_factored: bool = False  # it keeps sums of rows and columns
    is_8bit: bool = False
    gradients: int = 1
    state: int = 2
    weights: int = 2

    def state_bytes(self, weights: int, factored: int, width: int) -> int:
        """Return the bytes of the state of weights of so many bytes, each of `width`, and of such sums of all rows."""
        if self.is_8bit:
            numbers = -(-weights // width)
            return self.tensors * (numbers + 4 * -(-numbers // _BLOCK))
        return self.tensors * weights + self.is_factored * factored

    def moved(self, weights: int, gradients: int, state: int) -> int:
        """Return the bytes that an update reads and writes, of tensors of so many bytes."""
        return self.weights * weights + self.gradients * gradients + self.state * state


UPDATE_FACTS = MappingProxyType(
    {
        "sgd": UpdateFacts(),
        "momentum": UpdateFacts(1),
        "adam": UpdateFacts(2),
        "adamw": UpdateFacts(2),
        "adafactor": UpdateFacts(is_factored=True, gradients=3, state=4, weights=3),
        "lion": UpdateFacts(1),
        "sm3": UpdateFacts(is_factored=True),
        "adam-8bit": UpdateFacts(2, is_8bit=True),
        "lamb": UpdateFacts(2, state=3, weights=3),
        "lars": UpdateFacts(1, gradients=2, weights=3),
    }
)
