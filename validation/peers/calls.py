"""A call by which a runtime communicates, or the simulation of one."""

from typing import NamedTuple


class Call(NamedTuple):
    """A message as it is sent: how, to which rank (-1: to all), its bytes, and the task whose result it is."""

    call: str
    peer: int
    nbytes: int
    label: str = ""
