"""Trainings that go on where a killed command left off: their state after each epoch, as plain arrays in files."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from shutil import rmtree
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np
import torch
from torch import Tensor

from cdpsim.errors import RequestError
from cdpsim.files import writing as files

FOLDER, REQUEST = "unfinished", "request.json"
Tree = dict[Any, Any]  # of numbers or texts, down to tensors


class Unfinished:
    """The states of one request's trainings, in a folder of their own; a file for each part that is trained at once.

    With `force`, states of another request are dropped.
    """

    def __init__(self, output: str | Path, request: Mapping[str, object], *, force: bool = False) -> None:
        self._folder = Path(output) / FOLDER
        content = msgspec.json.format(msgspec.json.encode(request), indent=1)
        said = self._folder / REQUEST
        if self._folder.exists() and not (said.is_file() and said.read_bytes() == content):
            if not force:
                problem = "has an unfinished training of another request, of another torch or of other code"
                raise RequestError(str(self._folder), f"{problem}; --force drops it")
            self.drop()
        self._content = content

    def load(self, name: str) -> Tree | None:
        """Return the state of a part, if there is one."""
        file = self._file(name)
        if not file.is_file():
            return None
        try:
            with np.load(file, allow_pickle=False) as found:
                return _grown((path, torch.from_numpy(found[path])) for path in found.files)
        except (BadZipFile, ValueError, OSError, EOFError) as error:
            raise self.is_none(name, error) from None

    def is_none(self, name: str, error: Exception) -> RequestError:
        """Return the refusal of a file that is no state."""
        return RequestError(str(self._file(name)), f"is no state of a training ({error}); remove it")

    def save(self, name: str, state: Tree) -> None:
        """Write the state of a part."""
        if not (self._folder / REQUEST).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write_file(self._folder / REQUEST, [self._content])
        content = BytesIO()
        np.savez(content, allow_pickle=False, **{path: own.cpu().numpy() for path, own in _leaves(state)})
        files.write_file(self._file(name), [content.getvalue()], force=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{sha256(name.encode()).hexdigest()[:16]}.npz"

    def drop(self) -> None:
        """Remove all states."""
        rmtree(self._folder, ignore_errors=True)


def placed(tree: Tree, device: str) -> Tree:
    """Return a tree whose tensors are on a device."""
    return {key: own.to(device) if isinstance(own, Tensor) else placed(own, device) for key, own in tree.items()}


def _leaves(tree: Tree, above: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path of each tensor in a tree, whose names have no slash; a number's has a mark."""
    for key, value in tree.items():
        path = f"{above}{key}#" if isinstance(key, int) else f"{above}{key}"
        if isinstance(value, Tensor):
            yield path, value
        else:
            yield from _leaves(value, f"{path}/")


def _grown(leaves: Iterator[tuple[str, Tensor]]) -> Tree:
    """Return the tree that has these paths.

    >>> _grown(iter([("a/1#", 5), ("a/2#", 6), ("b", 7)]))
    {'a': {1: 5, 2: 6}, 'b': 7}
    """
    tree: Tree = {}
    for path, value in leaves:
        *above, last = (int(key[:-1]) if key.endswith("#") else key for key in path.split("/"))
        place = tree
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return tree
