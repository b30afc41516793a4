"""Files are read whole, written whole or not at all, and refused in one line."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdpsim.errors import RequestError
from cdpsim.files import writing as files
from cdpsim.files.writing import check_writable, read_text, write_file, write_folder

pytestmark = pytest.mark.filterwarnings("error")


def _failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def _unreadable(folder: Path) -> dict[str, tuple[Path, str]]:
    contents = {
        "empty": b"",
        "blank": b" \n",
        "binary": b"a\0b",
        "latin": b"caf\xe9",
        "large": b"a" * (2**24 + 1),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    return {
        "missing": (folder / "missing", "no such file or directory; check its spelling"),
        "folder": (folder, "is a folder; give a file"),
        "empty": (folder / "empty", "is empty; was it written to its end?"),
        "blank": (folder / "blank", "is empty"),
        "binary": (folder / "binary", "is binary; give a text file"),
        "latin": (folder / "latin", "is not UTF-8 text (byte 3); save it as UTF-8"),
        "large": (folder / "large", "is larger than 16 MiB"),
        "pipe": (folder / "pipe", "is not a regular file"),
        "device": (Path("/dev/zero"), "is not a regular file"),
        "below a file": (folder / "latin" / "x", "not a directory"),
        "long name": (folder / ("x" * 300), "file name too long; choose a shorter name"),
    }


UNREADABLE = ["missing", "folder", "empty", "blank", "binary", "latin", "large", "pipe", "device"]


@pytest.mark.parametrize("case", [*UNREADABLE, "below a file", "long name"])
def test_what_is_no_text_is_refused_with_its_path_and_a_remedy(case: str, tmp_path: Path) -> None:
    path, problem = _unreadable(tmp_path)[case]
    with pytest.raises(RequestError) as refusal:
        read_text(path)
    assert str(refusal.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800"])
@pytest.mark.parametrize("use", [read_text, check_writable])
def test_what_cannot_name_a_file_is_refused(path: str, use: Callable[[str], object]) -> None:
    with pytest.raises(RequestError, match="cannot name a file; give a path"):
        use(path)


def test_permission_to_read_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x")
    monkeypatch.setattr(Path, "open", _failing(errno.EACCES))
    with pytest.raises(RequestError, match="secret: permission denied; choose another path, or change"):
        read_text(tmp_path / "secret")


def test_text_is_read_as_it_is_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf\xce\xb8\r\n")
    assert read_text(str(tmp_path / "a")) == "θ\r\n"
    (tmp_path / "b").write_bytes(b"a" * files.LARGEST_TEXT_BYTES)
    assert len(read_text(tmp_path / "b")) == files.LARGEST_TEXT_BYTES


def test_a_caller_may_allow_more_or_less(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * (files.LARGEST_TEXT_BYTES + 1))
    assert len(read_text(tmp_path / "a", largest_bytes=2**40)) == files.LARGEST_TEXT_BYTES + 1
    assert len(read_text(tmp_path / "a", largest_bytes=files.LARGEST_TEXT_BYTES + 1)) == files.LARGEST_TEXT_BYTES + 1
    (tmp_path / "b").write_bytes(b"b" * (2**20 + 1))
    with pytest.raises(RequestError, match="is larger than 1 MiB; give a smaller file"):
        read_text(tmp_path / "b", largest_bytes=2**20)
    assert "MemTotal" in read_text("/proc/meminfo")  # which says that it has no bytes


def test_a_file_holds_what_was_given_with_ordinary_permissions(tmp_path: Path) -> None:
    chunks: list[str | bytes] = ["θ,", "1\n", b"\xff", "\udc80"]
    old = os.umask(0o027)
    try:
        write_file(tmp_path / "a.csv", iter(chunks))
        write_folder(tmp_path / "out", {"b": ["1"]})
    finally:
        os.umask(old)
    assert (tmp_path / "a.csv").read_bytes() == b"\xce\xb8,1\n\xff\\udc80"
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a.csv", "out", "out/b")]
    assert modes == [0o640, 0o750, 0o640]


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("x" * 255), ["1"])
    assert (tmp_path / ("x" * 255)).read_text() == "1"


def test_a_new_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    seen = []

    def chunks() -> Iterator[str]:
        seen.append((tmp_path / "out").exists())
        yield "2"

    write_folder(tmp_path / "out", {"a": ["1"], "b": chunks()})
    assert seen == [False]
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == {"a": "1", "b": "2"}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_folder_keeps_its_other_files_and_gets_the_new_ones_together(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "a").write_text("old")
    during = []

    def chunks() -> Iterator[str]:
        during.append((tmp_path / "a").read_text())
        yield "2"

    write_folder(tmp_path, {"a": ["1"], "b": chunks()}, force=True)
    assert during == ["old"]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "mine": "mine",
        "a": "1",
        "b": "2",
    }


def test_a_symlink_to_a_folder_is_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", {"a": ["1"]})
    assert (tmp_path / "real" / "a").read_text() == "1"
    assert (tmp_path / "link").is_symlink()


def _occupied(folder: Path) -> None:
    (folder / "file").write_text("old")
    (folder / "sub").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "out").mkdir()
    (folder / "out" / "a").write_text("old")
    (folder / "out" / "taken").mkdir()


@pytest.mark.parametrize(
    ("path", "names", "force", "problem"),
    [
        ("file", None, False, "file: already exists; --force overwrites"),
        ("dangling", None, False, "dangling: already exists; --force overwrites"),
        ("sub", None, True, "sub: is a folder; choose another name"),
        ("/dev/full", None, True, "/dev/full: is not a regular file; choose another name"),
        ("no/file", None, False, "no/file: there is no folder '.*no'; create it first"),
        ("file/x", None, False, "file/x: there is no folder '.*file'; create it first"),
        ("x" * 300, None, False, "x: file name too long; choose a shorter name"),
        ("x" * 300, ["a"], False, "x: file name too long; choose a shorter name"),
        ("file", ["a"], True, "file: is a file; give a folder"),
        ("dangling", ["a"], True, "dangling: is a file; give a folder"),
        ("out", ["b", "a"], False, "out/a: already exists; --force overwrites"),
        ("out", ["taken"], True, "out/taken: is a folder; choose another name"),
        ("no/out", ["a"], False, "no/out: there is no folder '.*no'; create it first"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    path: str, names: list[str] | None, force: bool, problem: str, tmp_path: Path
) -> None:
    _occupied(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def chunks() -> Iterator[str]:
        raise AssertionError("computed")
        yield ""

    with pytest.raises(RequestError, match=problem):
        check_writable(tmp_path / path, names, force)
    with pytest.raises(RequestError, match=problem):
        if names is None:
            write_file(tmp_path / path, chunks(), force=force)
        else:
            write_folder(tmp_path / path, {name: chunks() for name in names}, force=force)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "out" / "a").read_text() == "old"


def test_what_can_be_written_is_said_so_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _occupied(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert check_writable("new.svg") == Path("new.svg")
    assert check_writable("file", force=True) == Path("file")
    assert check_writable("dangling", force=True) == Path("dangling")
    assert check_writable("new", ["a"]) == Path("new")
    assert check_writable("out", iter(["b"])) == Path("out")
    assert sorted(tmp_path.rglob("*")) == before


def test_permission_to_write_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RequestError, match="a: permission denied; choose another path, or change"):
        write_file(tmp_path / "a", ["1"])


def _write(kind: str, folder: Path, chunks: Iterator[str]) -> None:
    if kind == "file":
        write_file(folder / "mine", chunks, force=True)
    else:
        write_folder(folder if kind == "into" else folder / "new", {"a": ["1"], "mine": chunks}, force=True)


@pytest.mark.parametrize("kind", ["file", "into", "new"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_leaves_nothing(kind: str, interruption: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("old")

    def chunks() -> Iterator[str]:
        yield "half"
        raise interruption

    with pytest.raises(interruption):
        _write(kind, tmp_path, chunks())
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"mine": "old"}


@pytest.mark.parametrize("kind", ["file", "into", "new"])
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (errno.ENOSPC, "no space left on device; free some space, or choose another path"),
        (errno.EIO, "input/output error; choose another path"),
    ],
)
def test_a_full_disk_is_refused_and_leaves_nothing(
    kind: str, code: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("old")
    monkeypatch.setattr(os, "fsync", _failing(code))
    with pytest.raises(RequestError, match=problem):
        _write(kind, tmp_path, iter(["whole"]))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"mine": "old"}


def test_a_limit_on_the_file_size_is_met_like_a_full_disk(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from cdpsim.files.writing import write_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_file(sys.argv[1], ["x" * 100] * 1000)
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / 'a'}: file too large; choose another path\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_sync_folders_is_none_the_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", _failing(errno.EINVAL))
    write_folder(tmp_path / "new", {"a": ["1"]})
    assert (tmp_path / "new" / "a").read_text() == "1"


@pytest.mark.parametrize("force", [False, True])
def test_what_gets_its_name_is_on_the_disk_before_and_its_name_after(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        named = "named" if (tmp_path / "a").exists() else "nameless"
        events.append(f"{named} folder" if name == str(tmp_path) else f"{named} {Path(name).stat().st_size} bytes")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    write_file(tmp_path / "a", ["12345"], force=force)
    assert events == ["nameless 5 bytes", "named folder"]


# Files that other processes write meanwhile


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def _links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with hard links, and one without."""
    if not request.param:
        monkeypatch.setattr(os, "link", _failing(errno.EPERM))


def _meanwhile(act: Callable[[], object]) -> Iterator[str]:
    """Chunks of a file; another program acts while they are made."""
    yield "mi"
    act()
    yield "ne"


def _tree(folder: Path) -> dict[str, str]:
    """The content of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.usefixtures("_links")
def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with pytest.raises(RequestError, match="a: already exists; --force overwrites"):
        write_file(target, _meanwhile(lambda: target.write_text("theirs")))
    assert _tree(tmp_path) == {"a": "theirs"}
    target.unlink()
    write_file(target, _meanwhile(lambda: target.write_text("theirs")), force=True)
    assert _tree(tmp_path) == {"a": "mine"}


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("there", [False, True])
def test_a_file_that_appears_meanwhile_in_a_folder_is_not_overwritten(there: bool, tmp_path: Path) -> None:
    """And none of the others is left there."""
    folder = tmp_path / "out"
    if there:
        folder.mkdir()

    def act() -> None:
        folder.mkdir(exist_ok=True)
        (folder / "b").write_text("theirs")

    with pytest.raises(RequestError, match="b: already exists; --force overwrites"):
        write_folder(folder, {"a": ["1"], "b": ["2"], "c": _meanwhile(act)})
    assert _tree(tmp_path) == {"out/b": "theirs"}
    shutil.rmtree(folder)
    write_folder(folder, {"a": ["1"], "b": ["2"], "c": _meanwhile(act)}, force=True)
    assert _tree(tmp_path) == {"out/a": "1", "out/b": "2", "out/c": "mine"}


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("inside", [[], ["theirs"]])
def test_a_folder_that_appears_meanwhile_keeps_what_it_has(inside: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def act() -> None:
        folder.mkdir(mode=0o700)
        for name in inside:
            (folder / name).write_text("x")

    write_folder(folder, {"a": ["1"], "b": _meanwhile(act)})
    assert _tree(tmp_path) == {"out/a": "1", "out/b": "mine"} | {f"out/{name}": "x" for name in inside}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_at_the_last_moment_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for it and the renaming."""
    rename = Path.rename

    def late(file: Path, target: Path) -> Path:
        target.mkdir()
        (target / "theirs").write_text("x")
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", late)
    write_folder(tmp_path / "out", {"a": ["1"]})
    assert _tree(tmp_path) == {"out/a": "1", "out/theirs": "x"}


def test_obsolete_files_go_with_what_is_overwritten(tmp_path: Path) -> None:
    for name in ("a", "seal", "gone", "mine"):
        (tmp_path / name).write_text("old")
    write_folder(tmp_path, {"a": ["new"], "seal": ["new"]}, force=True, obsolete=["gone", "never there"])
    assert _tree(tmp_path) == {"a": "new", "seal": "new", "mine": "old"}


KILLED = """
import os, signal, sys
from itertools import count
from pathlib import Path
from cdpsim.files.writing import write_folder

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.rmdir"}
home, there = Path(sys.argv[1]), sys.argv[2] == "there"
old, new = ({name: [side + name] for name in ("a", "b", "c", "seal")} for side in ("old ", "new "))

def save(k):
    events = count()
    def hook(event, arguments):
        if event in EVENTS and next(events) == k:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    write_folder(home / str(k), new, force=True, obsolete=["runs"])

for k in count():
    if there:
        write_folder(home / str(k), old)
        (home / str(k) / "mine").write_text("mine")
        (home / str(k) / "runs").write_text("old runs")
    child = os.fork()
    if not child:
        save(k)
        os._exit(0)
    if not os.waitpid(child, 0)[1]:
        break
print(k)
"""


@pytest.mark.parametrize("before", ["there", "nothing"])
def test_a_kill_between_any_two_steps_leaves_the_old_files_or_the_new_ones_or_no_seal(
    before: str, tmp_path: Path
) -> None:
    """The k-th folder is that of a process that was killed before its k-th change of the file system."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), before]
    kills = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kills >= 6
    sides: list[str] = []
    for k in range(kills + 1):
        found = {name: text for name, text in _tree(tmp_path / str(k)).items() if not name.startswith(".cdpsim-")}
        assert found.pop("mine", "mine") == "mine"
        sealed = {content.split()[0] for content in found.values()} if "seal" in found else {"refused"}
        assert len(sealed) == 1, f"a mixture after kill {k}: {found}"
        sides += sealed
    kinds = ["old", "refused", "new"] if before == "there" else ["refused", "new"]
    assert sorted(sides, key=kinds.index) == sides
    assert set(sides) == set(kinds)
    assert "runs" not in _tree(tmp_path / str(kills))


TERMINATED = """
import signal, sys
from cdpsim.cli import console
from cdpsim.files.writing import write_file, write_folder
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
def chunks():
    yield "x" * 100_000
    print("writing", flush=True)
    while True:
        signal.pause()
def serve(arguments):
    target = sys.argv[1]
    write_file(target, chunks()) if sys.argv[2] == "file" else write_folder(target, {"a": ["1"], "b": chunks()})
    return 0
sys.exit(console.exit_code_of(serve))
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_leaves_no_temporaries(kind: str, number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "target"), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        assert process.communicate() == ("", "cdpsim: terminated\n")
        assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


# Inputs


def test_what_was_read_is_not_overwritten(tmp_path: Path) -> None:
    """By none of its names, and only while a command is served."""
    model, hard, soft = (tmp_path / name for name in ("model", "hard", "soft"))
    model.write_text("precious")
    hard.hardlink_to(model)
    soft.symlink_to(model)
    with files.inputs_kept():
        check_writable(model, force=True)  # not read yet
        read_text(soft)
        for name in (model, hard, soft):
            with pytest.raises(RequestError, match=f"{name.name}: is read by this command; write to another name"):
                write_file(name, ["lost"], force=True)
            with pytest.raises(RequestError, match="is read by this command"):
                check_writable(tmp_path, ["new", name.name], force=True)
        read_text(tmp_path / "model", rewritten=True)
        write_file(tmp_path / "other", ["1"])
    assert _tree(tmp_path) == dict.fromkeys(("model", "hard", "soft"), "precious") | {"other": "1"}
    write_file(model, ["new"], force=True)
    assert model.read_text() == "new"


def test_what_a_command_has_written_it_may_write_again(tmp_path: Path) -> None:
    """Also after it has read that, and by the number of a file that is gone."""
    with files.inputs_kept():
        for content in ("one", "two", "three"):
            write_file(tmp_path / "results", [content], force=True)
            assert read_text(tmp_path / "results") == content
    assert (tmp_path / "results").read_text() == "three"


def test_what_is_rewritten_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("one")
    with files.inputs_kept():
        content = read_text(tmp_path / "results", rewritten=True)
        write_file(tmp_path / "results", [content, " two"], force=True)
    assert (tmp_path / "results").read_text() == "one two"


@pytest.mark.parametrize(
    "call", ["write_folder(sys.argv[1], {'a': ['1'], 'b': chunks()})", "write_file(sys.argv[1], chunks())"]
)
def test_a_kill_while_writing_leaves_no_target(call: str, tmp_path: Path) -> None:
    script = f"""
import sys
from cdpsim.files.writing import write_file, write_folder
def chunks():
    yield "x" * 100_000
    print("writing", flush=True)
    sys.stdin.read()
{call}
"""
    command = [sys.executable, "-c", script, str(tmp_path / "target")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "target").exists()
    assert [file.name[:8] for file in tmp_path.iterdir()] == [".cdpsim-"]


def test_a_file_named_as_standard_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"-: is standard output elsewhere, and a file is needed; give its name"):
        write_file("-", ["text"])
    write_file("./-", ["text"])
    assert [path.name for path in tmp_path.iterdir()] == ["-"]
