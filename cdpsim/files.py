"""Reading and writing files: whole or not at all, and every refusal one line with its remedy."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cdpsim.errors import RequestError

LARGEST_BYTES = 16 * 2**20

_REMEDIES = {
    errno.ENOENT: "check its spelling",
    errno.EACCES: "choose another path, or change its permissions",
    errno.EPERM: "choose another path, or change its permissions",
    errno.ENOSPC: "free some space, or choose another path",
    errno.EDQUOT: "free some space, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def read_text(path: str | Path, *, largest_bytes: int = LARGEST_BYTES) -> str:
    """Read a regular file of UTF-8 text that is not empty and at most 16 MiB large, or as large as the caller says."""
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


def check_writable(path: str | Path, names: Iterable[str] | None = None, force: bool = False) -> Path:
    """Refuse early what `write_file`, or `write_folder` with these names, would refuse."""
    target = _path(path)
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
    """Write a file that appears whole, or not at all; text is UTF-8 with newlines as given."""
    target = check_writable(path, force=force)
    temporary = _beside(target)
    with _refusing(str(target)), _removing(temporary):
        _fill(temporary, chunks)
        temporary.replace(target)
        _sync_folder(target.parent)


def write_folder(folder: str | Path, files: Mapping[str, Iterable[str | bytes]], *, force: bool = False) -> None:
    """Write files into a folder, which appears with all of them or not at all.

    If it is there already, its other files stay, and no new one appears before all are written.
    """
    target = check_writable(folder, files, force)
    with _refusing(str(target)):
        if target.is_dir():
            _write_into(target, files)
            return
        temporary = _beside(target)
        with _removing(temporary):
            temporary.mkdir()
            for name, chunks in files.items():
                _fill(temporary / name, chunks)
            _sync_folder(temporary)
            temporary.rename(target)
            _sync_folder(target.parent)


def _write_into(folder: Path, files: Mapping[str, Iterable[str | bytes]]) -> None:
    temporaries = {name: _beside(folder / name) for name in files}
    with _removing(*temporaries.values()):
        for name, chunks in files.items():
            _fill(temporaries[name], chunks)
        for name, temporary in temporaries.items():
            temporary.replace(folder / name)
        _sync_folder(folder)


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
        raise RequestError(str(file), "already exists; --force overwrites")


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
