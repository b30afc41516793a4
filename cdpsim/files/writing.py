"""Reading and writing files: whole or not at all, and every refusal one line with its remedy."""

import contextlib
import csv
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from cdpsim.errors import RequestError

LARGEST_BYTES = 16 * 2**20
FileId = tuple[int, int]  # device and inode


class Touched(NamedTuple):
    """The files that a command has read, and those that it has written, which are no inputs."""

    read: set[FileId]
    written: set[FileId]


_TOUCHED: ContextVar[Touched | None] = ContextVar("touched", default=None)
_REMEDIES = {
    errno.ENOENT: "check its spelling",
    errno.EACCES: "choose another path, or change its permissions",
    errno.EPERM: "choose another path, or change its permissions",
    errno.ENOSPC: "free some space, or choose another path",
    errno.EDQUOT: "free some space, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextlib.contextmanager
def inputs_kept() -> Iterator[None]:
    """Refuse inside to overwrite a file that was read inside, even by force: a command's output is not its input."""
    token = _TOUCHED.set(Touched(set(), set()))
    try:
        yield
    finally:
        _TOUCHED.reset(token)


def read_text(path: str | Path, *, largest_bytes: int = LARGEST_BYTES, rewritten: bool = False) -> str:
    """Read a regular file of UTF-8 text that is not empty and at most 16 MiB large, or as large as the caller says.

    A file that is `rewritten` is no input: the command that reads it may overwrite it.
    """
    file = _path(path)
    subject = str(file)
    with _refusing(subject):
        status = file.stat()
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            raise RequestError(subject, "is a folder; give a file")
        # Opening a pipe would wait for whoever writes into it.
        if not stat.S_ISREG(mode):
            raise RequestError(subject, "is not a regular file; copy its content into one")
        with file.open("rb") as opened:
            # Python sets aside all that it is asked for; a file of the kernel's says that it has no bytes.
            content = opened.read(min(largest_bytes, max(status.st_size, LARGEST_BYTES)) + 1)
        touched = _TOUCHED.get()
        if not (rewritten or touched is None or _id(status) in touched.written):
            touched.read.add(_id(status))
    if len(content) > largest_bytes:
        raise RequestError(subject, f"is larger than {largest_bytes >> 20} MiB; give a smaller file")
    if not content.strip():
        raise RequestError(subject, "is empty; was it written to its end?")
    if b"\0" in content:
        raise RequestError(subject, "is binary; give a text file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(subject, f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def read_csv(path: str | Path, *, largest_bytes: int = LARGEST_BYTES) -> list[list[str]]:
    """Read the cells of a CSV file, row by row."""
    try:
        return list(csv.reader(StringIO(read_text(path, largest_bytes=largest_bytes))))
    except csv.Error as error:
        raise RequestError(str(path), f"is no CSV file ({error}); write cells, with commas between them") from None


def check_writable(path: str | Path, names: Iterable[str] | None = None, force: bool = False) -> Path:
    """Refuse early what `write_file`, or `write_folder` with these names, would refuse."""
    target = _path(path)
    if names is not None and str(path) == "-":
        raise RequestError("-", "is standard output elsewhere, and a folder is needed; give its name, or ./-")
    with _refusing(str(target)):
        home, files = target.parent, [target]
        if names is not None and target.is_dir():
            home, files = target, [target / name for name in names]
        elif names is not None and os.path.lexists(target):
            raise RequestError(str(target), "is a file; give a folder")
        for file in files:
            _check_free(file, force)
        if not home.is_dir():
            raise RequestError(str(target), f"there is no folder {str(home)!r}; create it first")
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")
    return target


def write_file(path: str | Path, chunks: Iterable[str | bytes], *, force: bool = False) -> None:
    """Write a file that appears whole, or not at all; text is UTF-8 with newlines as given.

    Without `force`, a file that appears meanwhile under that name stays, and is refused.
    """
    target = check_writable(path, force=force)
    temporary = _beside(target)
    with _refusing(str(target)), _removing(temporary):
        _fill(temporary, chunks)
        _place(temporary, target, force)
        _sync_folder(target.parent)


def write_folder(
    folder: str | Path,
    files: Mapping[str, Iterable[str | bytes]],
    *,
    force: bool = False,
    obsolete: Sequence[str] = (),
) -> None:
    """Write files into a folder, which appears with all of them or not at all.

    If it is there already, its other files stay, but for the `obsolete` ones. The last of `files` is their seal: it
    is taken away before another one is replaced, and comes last. So a folder with a seal is never a mixture of two
    writes, whenever the process was killed.
    """
    target = check_writable(folder, files, force)
    with _refusing(str(target)):
        if target.is_dir():
            temporaries = {name: _beside(target / name) for name in files}
            with _removing(*temporaries.values()):
                _fill_all(temporaries, files)
                _place_all(temporaries, target, force, obsolete)
            return
        temporary = _beside(target)
        with _removing(temporary):
            temporary.mkdir()
            inside = {name: temporary / name for name in files}
            _fill_all(inside, files)
            _sync_folder(temporary)
            _place_folder(temporary, inside, target, force)
            _sync_folder(target.parent)


def _fill_all(temporaries: Mapping[str, Path], files: Mapping[str, Iterable[str | bytes]]) -> None:
    for name, chunks in files.items():
        _fill(temporaries[name], chunks)


def _place(temporary: Path, target: Path, force: bool) -> None:
    """Give a file its name; without `force` no other file loses that name."""
    if force:
        temporary.replace(target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise _taken(target) from None
    except OSError:  # a file system without links
        _claim(target)
        temporary.replace(target)


def _claim(target: Path) -> None:
    """Take a name by an empty file, unless it is taken."""
    try:
        target.open("xb").close()
    except FileExistsError:
        raise _taken(target) from None


def _place_all(temporaries: Mapping[str, Path], folder: Path, force: bool, obsolete: Sequence[str] = ()) -> None:
    """Give files their names in a folder, the last one last; without `force` all of them or none."""
    *others, seal = temporaries
    if force:
        (folder / seal).unlink(missing_ok=True)
        _sync_folder(folder)  # on the disk, too, nothing is replaced while the old seal is there
        for name in obsolete:
            (folder / name).unlink(missing_ok=True)
    with contextlib.ExitStack() as placed:
        for name in [*others, seal]:
            if name == seal:
                _sync_folder(folder)
            _place(temporaries[name], folder / name, force)
            if not force:
                placed.callback((folder / name).unlink, missing_ok=True)
        placed.pop_all()
    _sync_folder(folder)


def _place_folder(temporary: Path, inside: Mapping[str, Path], target: Path, force: bool) -> None:
    """Give a folder its name; if another one has appeared under it meanwhile, put the files into that."""
    try:
        if not os.path.lexists(target):
            temporary.rename(target)
            return
    except OSError:  # it appears at this moment
        if not target.is_dir():
            raise
    _place_all(inside, target, force)


def _path(path: str | Path) -> Path:
    text = str(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = ""
    # Path("") is the current folder, where an unset shell variable would write.
    if not text or "\0" in text:
        raise RequestError(repr(str(path)), "cannot name a file; give a path")
    return Path(path)


def _check_free(file: Path, force: bool) -> None:
    try:
        mode = file.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    # Renaming onto a device such as /dev/null would replace it.
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise RequestError(str(file), f"is {kind}; choose another name")
    if not force:
        raise _taken(file)
    touched = _TOUCHED.get()
    if touched is not None and file.exists() and _id(file.stat()) in touched.read:
        raise RequestError(str(file), "is read by this command; write to another name")


def _taken(file: Path) -> RequestError:
    return RequestError(str(file), "already exists; --force overwrites")


def _id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def _beside(target: Path) -> Path:
    # Without the target's own name in it, which may already be as long as a name can be.
    return target.with_name(f".cdpsim-{secrets.token_hex(8)}")


def _fill(file: Path, chunks: Iterable[str | bytes]) -> None:
    with file.open("xb") as opened:
        for chunk in chunks:
            # A path that is not UTF-8 may be quoted in what is written; that must not lose the rest.
            opened.write(chunk if isinstance(chunk, bytes) else chunk.encode("utf-8", "backslashreplace"))
        opened.flush()
        os.fsync(opened.fileno())
        if (touched := _TOUCHED.get()) is not None:
            touched.written.add(_id(os.fstat(opened.fileno())))
            touched.read.difference_update(touched.written)  # a new file may have the number of one that is gone


def _sync_folder(folder: Path) -> None:
    # Not every file system can; the names are in place by now, so that is no failure.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _removing(*temporaries: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for temporary in temporaries:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _refusing(subject: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = _REMEDIES.get(error.errno or 0, "choose another path")
        raise RequestError(subject, f"{reason}; {remedy}") from None
