"""Trainings that go on where a killed command left off: their state after each epoch, as plain arrays in files."""

from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from shutil import rmtree
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from cdpsim.errors import RequestError
from cdpsim.files import writing as files

FOLDER, REQUEST = "unfinished", "request.json"
State = dict[str, Any]  # down to tensors, and numbers, which are read as tensors


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

    def load(self, name: str) -> State | None:
        """Return the state of a part, if there is one."""
        file = self._file(name)
        if not file.is_file():
            return None
        try:
            with np.load(file, allow_pickle=False) as found:
                arrays = [found[str(k)] for k in range(len(found.files) - 1)]
                state: State = tree_unflatten(map(torch.from_numpy, arrays), treespec_loads(str(found["form"])))
        except (BadZipFile, LookupError, ValueError, OSError, EOFError) as error:
            raise self.is_none(name, error) from None
        return state

    def is_none(self, name: str, error: Exception) -> RequestError:
        """Return the refusal of a file that is no state."""
        return RequestError(str(self._file(name)), f"is no state of a training ({error}); remove it")

    def save(self, name: str, state: State) -> None:
        """Write the state of a part."""
        if not (self._folder / REQUEST).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write_file(self._folder / REQUEST, [self._content])
        leaves, form = tree_flatten(state)
        arrays = {str(k): torch.as_tensor(own).cpu().numpy() for k, own in enumerate(leaves)}
        content = BytesIO()
        np.savez(content, allow_pickle=False, form=np.array(treespec_dumps(form)), **arrays)
        files.write_file(self._file(name), [content.getvalue()], force=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{sha256(name.encode()).hexdigest()[:16]}.npz"

    def drop(self) -> None:
        """Remove all states."""
        rmtree(self._folder, ignore_errors=True)
