"""The system ends a process when its parent ends, however that came about."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Have this process ended as soon as the thread that started it is gone; on Linux, elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
