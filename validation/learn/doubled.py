"""Layers whose weight may be there twice, as forwards read it and as backwards do.

Where backwards read other parameters than their forwards, y = x W_f with the input held fixed, and (x - x) W_b with
W_b held fixed. So the gradient of the weight is the forward's, and that of the input goes through the backward's.
"""

from typing import Any

from torch import Tensor, nn

BACK = "back"  # the name of a weight as backwards read it


class Doubled(nn.Module):
    """A layer that may have its weight twice: as forwards read it, and as backwards do."""

    weight: Any
    bias: Any
    back: Tensor

    def twice(self) -> None:
        """Have the weight of backwards, too."""
        self.register_buffer(BACK, self.weight.detach().clone())

    @property
    def is_double(self) -> bool:
        """Whether it has it."""
        return BACK in self._buffers


class Linear(Doubled, nn.Linear):
    """A linear layer whose backward may go through another weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Map the last dimension."""
        if not self.is_double:
            return nn.Linear.forward(self, input)
        fixed = input.detach()
        return nn.functional.linear(fixed, self.weight, self.bias) + nn.functional.linear(input - fixed, self.back)


class Norm(Doubled, nn.LayerNorm):
    """A layer norm whose backward may go through another weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if not self.is_double:
            return nn.LayerNorm.forward(self, input)
        bare = nn.functional.layer_norm(input, self.normalized_shape, eps=self.eps)
        fixed = bare.detach()
        return fixed * self.weight + self.bias + (bare - fixed) * self.back
