"""Replays for ranks in tests: until one of them comes to harm, or with messages carried in another way."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdpsim.program import Op
from validation.ranks.member import Member, replay_part
from validation.replay.case import Case, Outcome
from validation.replay.contents import Message
from validation.replay.transport import Distributed, Pending
from validation.training.forms import Form


def sleep() -> None:
    """Announce it first on the output of this process."""
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


class Unsent(NamedTuple):
    """A message that its sender believes to be through, and that was never sent."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


def replay_harmed(member: Member, case: Case, rank: int, harm: str) -> Outcome | None:
    """Replay a device's part; before its third message, one rank comes to harm, or it skips that message."""
    begin, sent = member.transport.begin, 0

    def harmful(message: Message, tensor: Tensor | None = None, form: Form | None = None) -> Pending:
        nonlocal sent
        if message.op == Op.P2P and tensor is not None:
            sent += 1
            if sent == 3 and member.rank == rank:
                if harm == "skips":
                    return Unsent(tensor)
                HARMS[harm]()
        return begin(message, tensor, form)

    member.transport.begin = harmful  # type: ignore[method-assign]
    return replay_part(member, case)


class Landing(Distributed):
    """Every message goes through buffers of its own, as those of a GPU do with gloo."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.store, member.rank, member.count, staged=True)


class Through(dist.Work):
    """A message that has been waited for."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class Queued(Distributed):
    """Every message is through before anything else happens, as if it went through one queue for all."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.store, member.rank, member.count)

    def _begin(self, call: Callable[[], dist.Work | None]) -> dist.Work:
        super()._begin(call).wait()
        return Through()  # gloo's own would wait for another message


class Own(Distributed):
    """Collectives of shares are torch's own calls, as with NCCL."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.store, member.rank, member.count)

    @property
    def _is_native(self) -> bool:
        return True


CARRIERS: dict[str, Callable[[Member], Distributed]] = {"staged": Landing, "queued": Queued, "torch's own": Own}


def replay_carried(member: Member, case: Case, carrier: str) -> Outcome | None:
    """Replay a device's part with another transport."""
    return replay_part(replace(member, transport=CARRIERS[carrier](member)), case)
