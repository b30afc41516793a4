"""Ctrl-C while a command is still imported: a quiet exit with 130, and no traceback; imported before all else."""

import os
import signal
import sys

_MODULES = ("cdpsim", "validation", "cdpsim_validation")
_SCRIPTS = ("cdpsim", "cdpsim-validate")


def is_our_command(words: list[str]) -> bool:
    """Return whether a command line of Python runs this package, and does not merely import it.

    >>> is_our_command(["python", "-m", "cdpsim", "schedules"]), is_our_command(["python", "/usr/bin/cdpsim", "models"])
    (True, True)
    >>> is_our_command(["python", "mine.py", "cdpsim"]), is_our_command(["python", "-m", "pytest"])
    (False, False)
    """
    for k, word in enumerate(words[1:], 1):
        if words[k - 1] == "-m":
            return word in _MODULES
        if not word.startswith("-"):
            return os.path.basename(word).removesuffix(".exe") in _SCRIPTS  # noqa: PTH119 - pathlib is not yet imported
    return False


def _exit_quietly(number: int, _: object) -> None:
    os.write(2, b"cdpsim: interrupted\n")
    os._exit(130)


def exit_quietly_until_served() -> None:
    """Let Ctrl-C end a command at once, as long as it does nothing that would have to be cleared up."""
    if is_our_command(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_quietly)


def serve_interrupts() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _exit_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


exit_quietly_until_served()
