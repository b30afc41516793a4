"""The files that a trace writes."""

from pathlib import Path

from cdpsim import Trace


def files(trace: Trace, folder: Path) -> dict[str, bytes]:
    """Save a trace, and return the content of each file by its name."""
    trace.save(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}
