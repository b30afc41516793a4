"""Reading and writing files: an output appears whole or not at all, and a refusal is one line with its remedy."""

import contextlib
import csv
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

from cdpsim.errors import RequestError
from cdpsim.files.notes import detail

LARGEST_TEXT_BYTES = 16 * 2**20
FileId = tuple[int, int]  # device and inode


class Touched(NamedTuple):
    """The files that a command has read, and the files that it has written, which are no inputs."""

    read: set[FileId]
    written: set[FileId]


_TOUCHED: ContextVar[Touched | None] = ContextVar("touched", default=None)
COPIES: ContextVar[Mapping[str, str]] = ContextVar("copies", default=MappingProxyType({}))  # of texts, by path
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
    """Refuse to overwrite, even with force, a file that was read within this context: no output is its own input."""
    token = _TOUCHED.set(Touched(set(), set()))
    try:
        yield
    finally:
        _TOUCHED.reset(token)


def read_bytes(path: str | Path, *, largest_bytes: int = LARGEST_TEXT_BYTES, rewritten: bool = False) -> bytes:
    """Return the content of a regular file of at most 16 MiB, or as large as the caller says.

    A file that is `rewritten` is no input: the command that reads it may overwrite it.
    """
    file = checked_path(path)
    subject = str(file)
    with _refuse_system_errors(file):
        status = file.stat()
        size = status.st_size
        if stat.S_ISDIR(status.st_mode):
            raise RequestError(subject, "is a folder; give a file")
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(subject, "is not a regular file; copy its content into one")
        with file.open("rb") as opened:
            # Python allocates as much as it is asked for; the kernel's files say that they have no bytes.
            content = opened.read(max(size, LARGEST_TEXT_BYTES) + 1) if size <= largest_bytes else b""
        touched = _TOUCHED.get()
        if not (rewritten or touched is None or _file_id(status) in touched.written):
            touched.read.add(_file_id(status))
    detail(f"read {subject}: {len(content):,} bytes")
    if max(size, len(content)) > largest_bytes:
        raise RequestError(subject, f"is larger than {largest_bytes >> 20} MiB; give a smaller file")
    return content


def read_text(path: str | Path, *, largest_bytes: int = LARGEST_TEXT_BYTES, rewritten: bool = False) -> str:
    """Return the text of a file that `read_bytes` reads: UTF-8, and not empty; or the text of `COPIES` in its place."""
    if (copy := COPIES.get().get(str(path))) is not None:
        return copy
    content = read_bytes(path, largest_bytes=largest_bytes, rewritten=rewritten)
    subject = str(Path(path))
    if not content.strip():
        raise RequestError(subject, "is empty; was it written to its end?")
    if b"\0" in content:
        raise RequestError(subject, "is binary; give a text file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(subject, f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def read_csv(path: str | Path, *, largest_bytes: int = LARGEST_TEXT_BYTES) -> list[list[str]]:
    """Return the cells of a CSV file, row by row."""
    try:
        return list(csv.reader(StringIO(read_text(path, largest_bytes=largest_bytes))))
    except csv.Error as error:
        raise RequestError(str(path), f"is no CSV file ({error}); write cells, with commas between them") from None


def check_writable(path: str | Path, names: Iterable[str] | None = None, force: bool = False) -> Path:
    """Refuse what `write_file`, or `write_folder` with these names, would refuse; return the path."""
    target = checked_path(path)
    if str(path) == "-":
        kind = "file" if names is None else "folder"
        raise RequestError("-", f"is standard output elsewhere, and a {kind} is needed; give its name, or ./-")
    with _refuse_system_errors(target):
        parent, files = target.parent, [target]
        if names is not None and target.is_dir():
            parent, files = target, [target / name for name in names]
        elif names is not None and os.path.lexists(target):
            raise RequestError(str(target), "is a file; give a folder")
        for file in files:
            _check_name(file, force)
        if not parent.is_dir():
            raise RequestError(str(target), f"there is no folder {str(parent)!r}; create it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")
    return target


def write_file(path: str | Path, chunks: Iterable[str | bytes], *, force: bool = False) -> None:
    """Write a file that appears with all of its content or not at all; text is UTF-8 with newlines as given.

    Without `force`, a file that appears meanwhile under that name stays, and the request is refused.
    """
    target = check_writable(path, force=force)
    with _refuse_system_errors(target), _staging_folder(target.parent) as staging:
        size = _write_chunks(staging / "file", chunks)
        _rename_file(staging / "file", target, force)
        _sync_folder(target.parent)
    detail(f"wrote {target}: {size:,} bytes")


def write_folder(
    folder: str | Path,
    files: Mapping[str, Iterable[str | bytes]],
    *,
    force: bool = False,
    obsolete: Sequence[str] = (),
) -> None:
    """Write files into a folder, which appears with all of them or not at all.

    In a folder that exists, other files stay, but for the `obsolete` ones. The last of `files` is their seal: it is
    removed before any other file is replaced, and written last. So a folder with a seal is never a mixture of two
    writes, whenever the process was killed.
    """
    target = check_writable(folder, files, force)
    exists = target.is_dir()
    with _refuse_system_errors(target), _staging_folder(target if exists else target.parent) as staging:
        content = staging / "folder"
        content.mkdir()
        sizes = {name: _write_chunks(content / name, chunks) for name, chunks in files.items()}
        if exists:
            _rename_files(content, [*files], target, force, obsolete)
        else:
            _sync_folder(content)
            _rename_folder(content, [*files], target, force)
            _sync_folder(target.parent)
    for name, size in sizes.items():
        detail(f"wrote {target / name}: {size:,} bytes")


@contextlib.contextmanager
def _staging_folder(parent: Path) -> Iterator[Path]:
    """Make a folder for unfinished files, in the file system of the finished ones, and remove it at the end."""
    with TemporaryDirectory(prefix=".cdpsim-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _rename_file(file: Path, target: Path, force: bool) -> None:
    """Give a file its final name; without `force` no other file loses that name."""
    try:
        if force:
            file.replace(target)
        else:
            os.link(file, target)
    except FileExistsError:
        raise _already_exists(target) from None
    except OSError:
        if force:
            raise
        _claim_name(target)  # in a file system without links
        file.replace(target)


def _claim_name(target: Path) -> None:
    """Create an empty file of that name, unless the name is in use."""
    try:
        target.open("xb").close()
    except FileExistsError:
        raise _already_exists(target) from None


def _rename_files(content: Path, names: Sequence[str], target: Path, force: bool, obsolete: Sequence[str] = ()) -> None:
    """Move the files of those names into a folder that exists, the last one last; without `force` all or none."""
    *_, seal = names
    if force:
        (target / seal).unlink(missing_ok=True)
        _sync_folder(target)  # on the disk, too, nothing is replaced while the old seal exists
        for name in obsolete:
            (target / name).unlink(missing_ok=True)
    with contextlib.ExitStack() as undo:
        for name in names:
            if name == seal:
                _sync_folder(target)
            _rename_file(content / name, target / name, force)
            if not force:
                undo.callback((target / name).unlink, missing_ok=True)
        undo.pop_all()
    _sync_folder(target)


def _rename_folder(content: Path, names: Sequence[str], target: Path, force: bool) -> None:
    """Give a folder its final name; if another folder has appeared under it meanwhile, move the files into that."""
    try:
        if not os.path.lexists(target):
            content.rename(target)
            return
    except OSError:  # it appears at this moment
        if not target.is_dir():
            raise
    _rename_files(content, names, target, force)


def checked_path(path: str | Path) -> Path:
    """Return a path that can name a file or folder; refuse any other."""
    text = str(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = ""
    # Path("") is the current folder, where an unset shell variable would write.
    if not text or "\0" in text:
        raise RequestError(repr(str(path)), "cannot name a file; give a path")
    return Path(path)


def _check_name(file: Path, force: bool) -> None:
    try:
        mode = file.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    # Renaming onto a device such as /dev/null would replace it.
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise RequestError(str(file), f"is {kind}; choose another name")
    if not force:
        raise _already_exists(file)
    touched = _TOUCHED.get()
    if touched is not None and file.exists() and _file_id(file.stat()) in touched.read:
        raise RequestError(str(file), "is read by this command; write to another name")


def _already_exists(file: Path) -> RequestError:
    return RequestError(str(file), "already exists; --force overwrites")


def _file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def _write_chunks(file: Path, chunks: Iterable[str | bytes]) -> int:
    with file.open("xb") as opened:
        for chunk in chunks:
            # A text may quote a path that is not UTF-8; that must not lose the rest.
            opened.write(chunk if isinstance(chunk, bytes) else chunk.encode("utf-8", "backslashreplace"))
        opened.flush()
        os.fsync(opened.fileno())
        if (touched := _TOUCHED.get()) is not None:
            touched.written.add(_file_id(os.fstat(opened.fileno())))
            touched.read.difference_update(touched.written)  # a new file may have the inode of a deleted one
        return opened.tell()


def _sync_folder(folder: Path) -> None:
    # Some file systems cannot; the names are in place by now, so that is no failure.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _refuse_system_errors(subject: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = _REMEDIES.get(error.errno or 0, "choose another path")
        raise RequestError(str(subject), f"{reason}; {remedy}") from None
