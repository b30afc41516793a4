"""Only for the process from which ranks are forked: once it has imported this, it ends with its launcher."""

import os
import signal
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

from .parent import end_with_parent


def _leave(*_: object) -> None:
    """Remove multiprocessing's socket, and its folder unless that has another socket: the launcher is gone.

    A process that was forked from such a server, and starts a server itself, has the same folder.
    """
    address = getattr(forkserver._forkserver, "_forkserver_address", None)
    if address and Path(address).parent.name.startswith("pymp-"):
        with suppress(OSError):
            Path(address).unlink(missing_ok=True)
            Path(address).parent.rmdir()
    os._exit(1)


# Before anything slow: a launcher may be killed while torch is being imported. SIGTERM must not do this: it may come to
# all processes of a group at once, and then the launcher itself removes its files.
signal.signal(signal.SIGUSR1, _leave)
end_with_parent(signal.SIGUSR1)
