"""For the process that ranks are forked off, and for nobody else: importing this, it ends with its launcher."""

import os
import shutil
import signal
from multiprocessing import forkserver
from pathlib import Path

from validation.ranks.parent import end_with_parent


def _leave(*_: object) -> None:
    """Remove the folder of multiprocessing's socket: whoever should have done it is gone."""
    address = getattr(forkserver._forkserver, "_forkserver_address", None)
    if address and Path(address).parent.name.startswith("pymp-"):
        shutil.rmtree(Path(address).parent, ignore_errors=True)
    os._exit(1)


# Before anything slow: a launcher may be killed while torch is being imported.
signal.signal(signal.SIGTERM, _leave)
end_with_parent(signal.SIGTERM)
