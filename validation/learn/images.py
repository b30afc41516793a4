"""Images of a user's folders, CIFAR-10 and ImageNet: read where they lie, and altered at random as is usual."""

import os
import pickletools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdpsim.errors import RequestError, short_repr
from cdpsim.files.writing import read_bytes
from cdpsim.numeric.disturbances import uniforms

ALTERING = 1  # the stream of the random numbers by which images are altered
Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]  # left, top, right, bottom


class Colours(NamedTuple):
    """The mean and the deviation of each colour in the images of a set, between 0 and 1."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def normalized(self, pixels: Tensor) -> Tensor:
        """Return (image, colour, row, column) bytes as numbers of mean 0 and deviation 1, nearly."""
        mean, deviation = (torch.tensor(own)[:, None, None] for own in self)
        return (pixels / 255 - mean) / deviation


# CIFAR-10

CIFAR_COLOURS = Colours((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
ROWS, PIXELS, SIDE, PADDING = 10_000, 3072, 32, 4  # images of a file, bytes of an image
_LARGEST = 2 * ROWS * PIXELS  # bytes of a file
_BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
_INTEGERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1")


@dataclass(frozen=True)
class SmallImages:
    """Images in memory; trainings see random crops and flips of them."""

    pixels: Tensor  # (image, colour, row, column) bytes
    labels: Tensor

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.pixels)

    def take(self, numbers: Tensor, draws: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return images and labels; with a seed and an epoch, crops of images that have zeros around them."""
        x = CIFAR_COLOURS.normalized(self.pixels[numbers])
        return x if draws is None else self._cropped(x, numbers, draws), self.labels[numbers]

    def _cropped(self, x: Tensor, numbers: Tensor, draws: tuple[int, int]) -> Tensor:
        drawn = _drawn(*draws, len(self))[numbers]
        row, column = (drawn[:, :2] * (2 * PADDING + 1)).long().T
        windows = torch.nn.functional.pad(x, [PADDING] * 4).unfold(2, SIDE, 1).unfold(3, SIDE, 1)
        cropped = windows[torch.arange(len(x)), :, row, column]
        return torch.where(drawn[:, 2, None, None, None] < 0.5, cropped, cropped.flip(-1))


@lru_cache(maxsize=64)  # seeds of an epoch
def _drawn(seed: int, epoch: int, count: int) -> Tensor:
    """Draw three numbers between 0 and 1 for each image of a set."""
    return torch.from_numpy(uniforms(seed, epoch, ALTERING, 3 * count).reshape(-1, 3))


def cifar10(folder: Path) -> tuple[SmallImages, SmallImages, int]:
    """Return the images of CIFAR-10 to learn from and for the test, and the number of classes.

    The folder is `cifar-10-batches-bin` or `cifar-10-batches-py`, or has one of them.
    """
    _check_folder(folder, "cifar10")
    places = [
        (place, [f"{name}{suffix}" for name in _BATCHES], read)
        for version, suffix, read in (("bin", ".bin", read_binary), ("py", "", read_pickled))
        for place in (folder, folder / f"cifar-10-batches-{version}")
    ]
    lacks = [[name for name in names if not (place / name).is_file()] for place, names, _ in places]
    k = min(range(len(places)), key=lambda k: len(lacks[k]))
    place, names, read = places[k]
    if lacks[k]:
        problem = f"has no {', '.join(lacks[k])}; give the folder of CIFAR-10's binary or python version"
        raise RequestError(str(place), problem)
    parts = [read(place / name) for name in names]
    pixels, labels = (torch.from_numpy(np.concatenate(own)) for own in zip(*parts, strict=True))
    pixels = pixels.reshape(-1, 3, SIDE, SIDE)
    return SmallImages(pixels[:-ROWS], labels[:-ROWS]), SmallImages(pixels[-ROWS:], labels[-ROWS:]), 10


def read_binary(path: Path) -> tuple[Pixels, NDArray[np.int64]]:
    """Return the images and labels of a file in which each label stands before its image."""
    content = np.frombuffer(read_bytes(path, largest_bytes=_LARGEST), dtype=np.uint8)
    if len(content) != ROWS * (1 + PIXELS):
        raise _other_size(path, f"{len(content):,} bytes", f"{ROWS * (1 + PIXELS):,}")
    rows = content.reshape(ROWS, 1 + PIXELS)
    return _checked(path, rows[:, 1:], rows[:, 0].tolist())


def read_pickled(path: Path) -> tuple[Pixels, NDArray[np.int64]]:
    """Return the images and labels of a pickle, by listing its operations: nothing in it is run.

    Protocols 0 and 1, which do not mark the order of an array, are refused.
    """
    found: list[bytes] = []
    labels: list[int] = []
    behind_labels = marked = transposed = False
    try:
        content = read_bytes(path, largest_bytes=_LARGEST)
        if not content.startswith(b"\x80"):
            raise ValueError("its protocol is older than 2")
        for operation, argument, _ in pickletools.genops(content):
            if isinstance(argument, str | bytes | bytearray):
                content = argument.encode("latin-1") if isinstance(argument, str) else bytes(argument)
                if len(content) == ROWS * PIXELS:
                    found.append(content)
                    transposed = marked
                # Python 3 writes bytes for protocol 2 as a text and the name of its encoding.
                behind_labels = content == b"labels" or (behind_labels and content == b"latin1")
                transposed |= content == b"F"  # by which numpy says from protocol 5 on that columns come first
            elif operation.name in ("NEWTRUE", "NEWFALSE"):
                marked = operation.name == "NEWTRUE"  # and so before, before the array's bytes
            elif behind_labels and operation.name in _INTEGERS and isinstance(argument, int):
                labels.append(argument)
    except ValueError as error:
        raise RequestError(str(path), f"is no pickle of CIFAR-10: {error}; take the file of the archive") from None
    if len(found) != 1 or len(labels) != ROWS:
        sizes = f"{len(found)} arrays of {ROWS * PIXELS:,} bytes and {len(labels):,} labels"
        raise _other_size(path, sizes, f"1 and {ROWS:,}")
    pixels = np.frombuffer(found[0], dtype=np.uint8)
    return _checked(path, pixels.reshape(PIXELS, ROWS).T if transposed else pixels.reshape(ROWS, PIXELS), labels)


def _checked(path: Path, pixels: Pixels, labels: Sequence[int]) -> tuple[Pixels, NDArray[np.int64]]:
    if wrong := [label for label in labels if not 0 <= label <= 9]:
        problem = f"has a label {short_repr(wrong[0])}; labels are 0 to 9; take the file of the archive"
        raise RequestError(str(path), problem)
    return pixels, np.array(labels, dtype=np.int64)


def _other_size(path: Path, found: str, expected: str) -> RequestError:
    return RequestError(str(path), f"has {found}, and not {expected}; take the file of the archive")


def _check_folder(folder: Path, name: str) -> None:
    if not folder.is_dir():
        raise RequestError(str(folder), f"is no folder; give {name}:DIR, the folder where the files of {name} are")


# ImageNet

IMAGENET_COLOURS = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROP, SHORTER_SIDE = 224, 256
TRIES, AREA, RATIO = 10, (0.08, 1.0), (3 / 4, 4 / 3)
THREADS = 4  # which decode; pillow lets them run side by side


@dataclass(frozen=True)
class ImageFiles:
    """Images in files, decoded when they are taken."""

    paths: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.paths)

    def take(self, numbers: Tensor, draws: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return images and labels; with a seed and an epoch, random crops in random sizes."""

        def decode(number: int) -> Pixels:
            return _decoded(self.paths[number], None if draws is None else (*draws, number))

        with ThreadPoolExecutor(THREADS) as pool:
            pixels = torch.from_numpy(np.stack([*pool.map(decode, numbers.tolist())]))
        return IMAGENET_COLOURS.normalized(pixels.permute(0, 3, 1, 2)).contiguous(), self.labels[numbers]


def imagenet(folder: Path) -> tuple[ImageFiles, ImageFiles, int]:
    """Return images of folders to learn from and for the test, a folder for each class, and the number of classes."""
    _check_folder(folder, "imagenet")
    image = _pillow()
    suffixes = {suffix for suffix, form in image.registered_extensions().items() if form in image.OPEN}
    classes, tested = (_subfolders(folder / part) for part in ("train", "val"))
    if others := sorted(set(tested) - set(classes)):
        raise RequestError(str(folder / "val" / others[0]), "is of a class that train has not; remove it")
    train, test = (_files(folder / part, classes, suffixes) for part in ("train", "val"))
    if lacks := sorted(set(range(len(classes))) - set(train.labels.tolist())):
        problem = "has no image that pillow reads; give it some, or remove it"
        raise RequestError(str(folder / "train" / classes[lacks[0]]), problem)
    if not len(test):
        raise RequestError(str(folder / "val"), "has no image that pillow reads; give it some")
    return train, test, len(classes)


def _subfolders(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if folder.is_dir() else []
    if not names:
        problem = "is no folder with a folder for each class; give imagenet:DIR with train/, val/"
        raise RequestError(str(folder), problem)
    return names


def _files(folder: Path, classes: Sequence[str], suffixes: set[str]) -> ImageFiles:
    found = [
        (path, label)
        for label, folder_of in enumerate(folder / own for own in classes)
        if folder_of.is_dir()
        for path in sorted(entry.path for entry in os.scandir(folder_of))
        if Path(path).suffix.lower() in suffixes
    ]
    return ImageFiles([path for path, _ in found], torch.tensor([label for _, label in found], dtype=torch.int64))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise RequestError("data", "images are decoded by pillow; run `pip install pillow`") from None
    return Image


def _decoded(path: str, draws: tuple[int, int, int] | None) -> Pixels:
    """Return an image as (row, column, colour) bytes: a random part where there are draws, else its centre."""
    image = _pillow()
    try:
        with image.open(path) as opened:
            picture = opened.convert("RGB")
    except Exception as error:  # pillow's decoders raise many kinds
        raise RequestError(path, f"cannot be decoded: {error}; remove or replace it") from None
    if draws is None:
        shorter = min(picture.size)
        width, height = (SHORTER_SIDE * side // shorter for side in picture.size)
        left, top = (round((side - CROP) / 2) for side in (width, height))
        part = picture.resize((width, height), image.BILINEAR).crop((left, top, left + CROP, top + CROP))
    else:
        seed, epoch, number = draws
        drawn = iter(uniforms(seed, epoch, ALTERING, 1 + 4 * TRIES, number).tolist())
        flipped = next(drawn) < 0.5
        part = picture.crop(random_box(picture.size, drawn)).resize((CROP, CROP), image.BILINEAR)
        part = part.transpose(image.FLIP_LEFT_RIGHT) if flipped else part
    return np.array(part)


def random_box(size: tuple[int, int], drawn: Iterator[float]) -> Box:
    """Return a part of an image with an area and a ratio of sides that are drawn: ten tries, then the centre."""
    width, height = size
    for area, ratio, left, top in zip(*[drawn] * 4, strict=True):
        pixels = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
        aspect = RATIO[0] * (RATIO[1] / RATIO[0]) ** ratio
        across, down = round(sqrt(pixels * aspect)), round(sqrt(pixels / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(left * (width - across + 1)), int(top * (height - down + 1))
            break
    else:
        across, down = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
        left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


FOLDERS: dict[str, Callable[[Path], tuple[Any, Any, int]]] = {"cifar10": cifar10, "imagenet": imagenet}
