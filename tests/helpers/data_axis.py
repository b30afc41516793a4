"""Schedules whose data ranks may share all states, each in one small shape."""

from typing import Any

FLUSHING: dict[str, dict[str, Any]] = {
    "dp": {"n": 3, "m": 2},
    "gpipe": {"n": 2, "m": 2},
    "1f1b": {"n": 2, "m": 4},
    "interleaved-1f1b": {"n": 4, "m": 4, "chunks": 2},
    "chimera": {"n": 4, "m": 4},
    "zb-h1": {"n": 2, "m": 2},
}
