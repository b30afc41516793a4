"""Data to learn from that need no download: digits, text that comes with Python, sequences by a rule, and folders."""

import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError, choose, short_repr

from .. import install_command
from .images import FOLDERS

CHARACTERS = 200_000  # of a text
LENGTH = 64  # of a sequence of characters
TESTED = 5  # every fifth sample is kept for the test

Draws = tuple[int, int]  # the seed and the epoch by which samples are altered at random


class Samples(Protocol):
    """Samples by their numbers."""

    def __len__(self) -> int:
        """Return how many there are."""

    def take(self, numbers: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and labels; with draws, as they are learnt from: altered at random, always the same of both."""


@dataclass(frozen=True)
class Tensors:
    """Samples that are two tensors, and are never altered."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.inputs)

    def take(self, numbers: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and labels."""
        return self.inputs[numbers], self.labels[numbers]


def label_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of labels; labels below 0 do not count."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=-1)


class Data(NamedTuple):
    """Samples to learn from and samples for a test. Labels below 0 do not count."""

    name: str
    train: Samples
    test: Samples
    classes: int
    tokens: int = 0  # the number of tokens that inputs have; 0: they are numbers
    about: tuple[str, ...] = ()
    loss: Callable[[Tensor, Tensor], Tensor] = label_loss  # of scores and labels, a mean

    @property
    def samples(self) -> int:
        """The number of samples to learn from."""
        return len(self.train)

    @property
    def shape(self) -> torch.Size:
        """The shape of an input."""
        return self.test.take(torch.zeros(1, dtype=torch.int64))[0].shape[1:]


def digits() -> Data:
    """Return the 1,797 handwritten digits of scikit-learn: 64 grey values each."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RequestError("data", f"digits come with scikit-learn; run `{install_command('learn')}`") from None
    found = load_digits()
    x = torch.tensor(found.data / 16 - 0.5, dtype=torch.float64)
    y = torch.tensor(found.target, dtype=torch.int64)
    return _divided("digits", x, y, 10)


def text() -> Data:
    """Return the language reference that comes with Python, character by character."""
    topics = pydoc_data.topics.topics
    whole = "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    letters = sorted(set(whole))
    number = {letter: k for k, letter in enumerate(letters)}
    codes = torch.tensor([number[letter] for letter in whole])
    rows = codes[: (len(codes) - 1) // LENGTH * LENGTH + 1]
    x, y = rows[:-1].reshape(-1, LENGTH), rows[1:].reshape(-1, LENGTH)
    about = f"{len(whole):,} characters", f"sha256 {sha256(whole.encode()).hexdigest()[:16]}"
    return _divided("text", x, y, len(letters), tokens=len(letters), about=about)


def addition() -> Data:
    """Return all sums of two numbers modulo 31: the answer is asked for at the last place."""
    of = 31
    a, b = (index.ravel() for index in np.indices((of, of)))
    x = torch.tensor(np.stack([a, b, np.full(len(a), of)], axis=1))
    y = torch.full_like(x, -1)
    y[:, -1] = torch.tensor((a + b) % of)
    return _divided("sequences:addition", x, y, of, tokens=of + 1)


def parity() -> Data:
    """Return drawn bits; each place asks for the parity so far."""
    bits = np.random.default_rng(0).integers(0, 2, (4096, 16))
    return _divided("sequences:parity", torch.tensor(bits), torch.tensor(bits.cumsum(axis=1) % 2), 2, tokens=2)


def copying() -> Data:
    """Return drawn letters, which are asked for once more behind a mark."""
    letters, length = 8, 8
    drawn = np.random.default_rng(0).integers(0, letters, (4096, length))
    mark = np.full((len(drawn), 1), letters)
    x = np.concatenate([drawn, mark, drawn[:, :-1]], axis=1)
    y = np.concatenate([np.full_like(drawn, -1), drawn], axis=1)
    return _divided("sequences:copy", torch.tensor(x), torch.tensor(y), letters, tokens=letters + 1)


def fake() -> Data:
    """Return drawn images with drawn labels, to measure how long learning takes: they can only be memorised."""
    draw, samples = np.random.default_rng(0), 2048
    x = torch.tensor(draw.standard_normal((samples, 3, 32, 32), dtype=np.float32))
    return _divided("fake", x, torch.tensor(draw.integers(0, 10, samples)), 10)


DATA: dict[str, Callable[[], Data]] = {
    "digits": digits,
    "text": text,
    "sequences:addition": addition,
    "sequences:copy": copying,
    "sequences:parity": parity,
    "fake": fake,
}
ALL_DATA = (*DATA, *(f"{kind}:DIR" for kind in FOLDERS))


@cache
def load_data(name: str) -> Data:
    """Return the data of a name; those of a user's folder have it behind a colon."""
    kind, _, folder = name.partition(":")
    if kind not in FOLDERS:
        return DATA[choose("data", name, ALL_DATA)]()
    if not folder:
        raise RequestError("data", f"{short_repr(name)} lies in a folder of yours; give it: {kind}:DIR")
    return Data(kind, *FOLDERS[kind](Path(folder).expanduser()))


def _divided(name: str, x: Tensor, y: Tensor, classes: int, tokens: int = 0, about: tuple[str, ...] = ()) -> Data:
    """Return data whose samples for a test are drawn, always the same."""
    order = torch.tensor(np.random.default_rng(0).permutation(len(x)))
    test = order[: len(x) // TESTED]
    train = order[len(x) // TESTED :]
    return Data(name, Tensors(x[train], y[train]), Tensors(x[test], y[test]), classes, tokens, about)


def batches(data: Data, seed: int, epoch: int, batch: int) -> Iterator[Tensor]:
    """Yield the samples of each batch of an epoch, by their numbers, in an order of the seed; the rest is left out."""
    order = torch.tensor(np.random.default_rng(np.random.SeedSequence((seed, epoch))).permutation(data.samples))
    for low in range(0, data.samples - batch + 1, batch):
        yield order[low : low + batch]
