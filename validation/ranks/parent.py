"""The end of a process with its parent, for whatever reason that ended."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Let Linux end this process as soon as the thread that started it is gone; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
