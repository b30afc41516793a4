"""What ranks do in tests: replay until something goes wrong with one of them."""

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from validation.member import Member, replay_part
from validation.plan import Message
from validation.replay import Case, Outcome
from validation.transport import Pending


def sleep() -> None:
    """Say so first, to whoever reads what this process writes."""
    print("asleep", flush=True)
    time.sleep(600)


def complain() -> None:
    raise ValueError("as the test wants\nand more of it")


HARMS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": complain,
    "leaves": lambda: sys.exit(0),
    "large tensor": lambda: torch.empty(1 << 50),
    "large array": lambda: np.empty(1 << 50),
    "sleeps": sleep,
}


def replay_harmed(member: Member, case: Case, rank: int, harm: str) -> Outcome | None:
    """Replay a device's part; before its third message, one rank comes to harm."""
    send, sent = member.transport.send, 0

    def harmful(message: Message, tensor: Tensor) -> Pending:
        nonlocal sent
        sent += 1
        if sent == 3 and member.rank == rank:
            HARMS[harm]()
        return send(message, tensor)

    member.transport.send = harmful  # type: ignore[method-assign]
    return replay_part(member, case)
