"""Trainings that go on where a killed command left off: their state after each epoch, in files of `torch.save`."""

from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from shutil import rmtree
from typing import Any

import msgspec
import torch

from cdpsim.errors import RequestError
from cdpsim.files import writing as files

FOLDER, REQUEST = "unfinished", "request.json"
State = dict[str, Any]  # down to tensors and numbers, which are read without running anything


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
        """Return the state of a part, if there is one, with tensors on the devices that they were on."""
        file = self._file(name)
        if not file.is_file():
            return None
        try:
            found: State = torch.load(file, weights_only=True)
        except (UnpicklingError, RuntimeError, ValueError, OSError, EOFError) as error:
            raise self.is_none(name, error) from None
        return found

    def is_none(self, name: str, error: Exception) -> RequestError:
        """Return the refusal of a file that is no state."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return RequestError(str(self._file(name)), f"is no state of a training ({reason}); remove it")

    def save(self, name: str, state: State) -> None:
        """Write the state of a part."""
        if not (self._folder / REQUEST).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write_file(self._folder / REQUEST, [self._content])
        content = BytesIO()
        torch.save(state, content)
        files.write_file(self._file(name), [content.getvalue()], force=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{sha256(name.encode()).hexdigest()[:16]}.pt"

    def drop(self) -> None:
        """Remove all states."""
        rmtree(self._folder, ignore_errors=True)
