"""Faults that are put into a replay on purpose: into its program, its devices or its transport."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cdpsim.numeric.columns import Ints
from cdpsim.program import Buffers, Category, Content, Edges, Kind, Messages, Op, Program
from validation.replay import case as cases
from validation.replay import interpreter
from validation.replay.case import Case
from validation.replay.contents import Holding, Message
from validation.replay.interpreter import BufferStore, Device
from validation.replay.plan import Plan
from validation.replay.policy import gradients, optimizer_state
from validation.replay.transport import InProcess, Mailboxes, Pending
from validation.training.optimizer import OPTIMIZERS

Seed = Callable[[pytest.MonkeyPatch], None]


class Fault(NamedTuple):
    """A fault, the schedule in which it is, and a pattern of the words that tell what is wrong."""

    name: str
    schedule: str
    seed: Seed
    told: str
    how: Mapping[str, Any] = {}  # what is not as usual in the case

    @property
    def case(self) -> Case:
        """The case that it is put into."""
        return Case(self.schedule, 2, **{"steps": 2, "optimizer": OPTIMIZERS["momentum"], **self.how})


# Faults of a program


def program(change: Callable[[Program], Program]) -> Seed:
    """Return the seed of another program."""
    planned = cases.planned

    def seed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(cases, "planned", lambda case: Plan(change(planned(case).program)))

    return seed


def buffers(change: Callable[[Program, Buffers, Ints], dict[str, Ints]], category: Category) -> Seed:
    """Return the seed of other columns of buffers; those of a category are given."""

    def changed(old: Program) -> Program:
        rows = np.flatnonzero(old.buffers.category == category)
        columns = {name: column.copy() for name, column in vars(old.buffers).items()}
        own = Buffers(**columns)
        return replace(old, buffers=replace(own, **change(old, own, rows)))

    return program(changed)


def hold_to_the_end(old: Program, own: Buffers, rows: Ints) -> dict[str, Ints]:
    own.end[rows] = 2 * (len(old.tasks) - 1) + 1
    return {"end": own.end}


def hold_one_to_the_end(old: Program, own: Buffers, rows: Ints) -> dict[str, Ints]:
    return hold_to_the_end(old, own, rows[:1])


def end_as_it_begins(old: Program, own: Buffers, rows: Ints) -> dict[str, Ints]:
    """Free the first stash with its forward."""
    row = old.stashes[0]
    own.end[row] = own.begin[row] + 1
    return {"end": own.end}


def end_at_first_reader(old: Program, own: Buffers, rows: Ints) -> dict[str, Ints]:
    """Free the first version of a stage after a forward."""
    row = rows[0]
    tasks = old.tasks
    reads = (tasks.device == own.device[row]) & (tasks.stage == own.stage[row]) & (tasks.kind == Kind.F)
    own.end[row] = 2 * np.flatnonzero(reads)[0] + 1
    kept = own.kept != row
    return {"end": own.end, "kept": own.kept[kept], "kept_until": own.kept_until[kept]}


def hold_twice(old: Program, own: Buffers, rows: Ints) -> dict[str, Ints]:
    own.size[rows[0]] *= 2
    return {"size": own.size}


def hold_more(more: int) -> Callable[[Program, Buffers, Ints], dict[str, Ints]]:
    """Return the change of the first buffer by that many bytes."""

    def change(old: Program, own: Buffers, rows: Ints) -> dict[str, Ints]:
        own.size[rows[0]] += more
        return {"size": own.size}

    return change


def messages(change: Callable[[Messages], dict[str, Ints]]) -> Seed:
    """Return the seed of other columns of messages."""

    def changed(old: Program) -> Program:
        own = Messages(**{name: column.copy() for name, column in vars(old.messages).items()})
        return replace(old, messages=replace(own, **change(own)))

    return program(changed)


def size(more: int) -> Callable[[Messages], dict[str, Ints]]:
    """Return the change of the first message by that many bytes."""

    def change(own: Messages) -> dict[str, Ints]:
        own.size[0] += more
        return {"size": own.size}

    return change


def other_version(own: Messages) -> dict[str, Ints]:
    own.step[np.flatnonzero(own.content == Content.PARAMETERS)[-1]] -= 1
    return {"step": own.step}


def other_receiver(own: Messages) -> dict[str, Ints]:
    own.src[0], own.dst[0] = own.dst[0], own.src[0]
    return {"src": own.src, "dst": own.dst}


def swap_contents(own: Messages) -> dict[str, Ints]:
    """Let two messages between the same devices bring what the other one should."""
    same = (own.content == Content.ACTIVATION) & (own.src == own.src[0]) & (own.dst == own.dst[0])
    first, second = np.flatnonzero(same & (own.step == 0))[:2]
    own.micro_batch[[first, second]] = own.micro_batch[[second, first]]
    return {"micro_batch": own.micro_batch}


def drop(content: Content) -> Seed:
    """Return the seed of a program without its last message of a content."""

    def changed(old: Program) -> Program:
        row = int(np.flatnonzero(old.messages.content == content)[-1])
        gone = len(old.tasks) + row

        def moved(nodes: Ints, per: int = 1) -> Ints:
            column: Ints = np.where(nodes >= per * (gone + 1), nodes - per, nodes)
            return column

        rows = np.arange(len(old.messages)) != row
        own, edges = old.buffers, old.edges
        left = (edges.before != gone) & (edges.after != gone)
        ends, also = own.end >> 1, own.kept_until >> 1
        end = np.where(ends == gone, np.maximum(own.begin, 0) | 1, own.end)
        still = also != gone
        begins = own.begin >> 1 != gone
        number = np.cumsum(begins) - 1
        still &= begins[own.kept]
        columns = {name: column for name, column in vars(own).items() if name not in ("kept", "kept_until")}
        columns |= {"end": moved(end, 2), "begin": moved(own.begin, 2)}
        return replace(
            old,
            messages=Messages(**{name: column[rows] for name, column in vars(old.messages).items()}),
            edges=Edges(moved(edges.before[left]), moved(edges.after[left]), edges.kind[left]),
            buffers=Buffers(
                **{name: column[begins] for name, column in columns.items()},
                kept=number[own.kept[still]],
                kept_until=moved(own.kept_until[still], 2),
            ),
        )

    return program(changed)


def repeat(content: Content) -> Seed:
    """Return the seed of a program with its last message of a content twice, which the same tasks wait for."""

    def changed(old: Program) -> Program:
        row = int(np.flatnonzero(old.messages.content == content)[-1])
        node, new = len(old.tasks) + row, len(old.tasks) + len(old.messages)
        edges = old.edges
        into, out = edges.after == node, edges.before == node
        return replace(
            old,
            messages=Messages(**{name: np.append(c, c[row]) for name, c in vars(old.messages).items()}),
            edges=Edges(
                np.concatenate([edges.before, edges.before[into], np.full(out.sum(), new)]),
                np.concatenate([edges.after, np.full(into.sum(), new), edges.after[out]]),
                np.concatenate([edges.kind, edges.kind[into], edges.kind[out]]),
            ),
        )

    return program(changed)


def read_older(old: Program) -> Program:
    """Let a task of the second step read the version before."""
    version = old.tasks.version.copy()
    reads = (old.tasks.kind != Kind.U) & (version == 1)
    stage = old.tasks.stage[np.flatnonzero(reads)[0]]
    version[reads & (old.tasks.stage == stage)] = 0
    return replace(old, tasks=replace(old.tasks, version=version))


def start_from_the_first(old: Program) -> Program:
    """Let all updates start from the first version."""
    return replace(old, base=np.zeros_like(old.base))


def another_rule(patch: pytest.MonkeyPatch) -> None:
    """Play the program of CDP-v1 for that of CDP-v2."""
    planned = cases.planned
    patch.setattr(cases, "planned", lambda case: planned(case.but(rule="cdp-v1")))


# Faults of devices


def device(name: str, wrap: Callable[[Any], Callable[..., Any]]) -> Seed:
    """Return the seed of another method of devices; `wrap` makes it from the right one."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Device, name, wrap(getattr(Device, name)))

    return seed


def passes(name: str, wrap: Callable[[Any], Callable[..., Any]]) -> Seed:
    """Return the seed of another pass."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(interpreter, name, wrap(getattr(interpreter, name)))

    return seed


def scratch_before(bytes_: int) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrapper that allocates that many bytes for a moment."""

    def wrap(right: Any) -> Callable[..., Any]:
        def wrong(*given: Any, **named: Any) -> Any:
            torch.empty(bytes_, dtype=torch.uint8)
            return right(*given, **named)

        return wrong

    return wrap


def workspace_before(bytes_: int, kept: list[Tensor] | None = None) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrapper that allocates that many bytes as a kernel does, in no storage that a tracker sees."""

    def wrap(right: Any) -> Callable[..., Any]:
        def wrong(*given: Any, **named: Any) -> Any:
            with _disable_current_modes():
                own = torch.empty(bytes_, dtype=torch.uint8)
            if kept is not None:
                kept.append(own)
            del own
            return right(*given, **named)

        return wrong

    return wrap


def update_wide(right: Any) -> Callable[..., Any]:
    """Update in float64, and round the result."""

    def wrong(self: Device, stage: int, theta: Tensor, gradient: Tensor, *, keep: bool) -> Tensor:
        found: Tensor = right(self, stage, theta.double(), gradient.double(), keep=keep)
        return found.to(theta.dtype)

    return wrong


def update_twice(right: Any) -> Callable[..., Any]:
    def wrong(self: Device, node: int) -> None:
        _, _, stage = self._place(node)
        held = Holding(Category.OPTIMIZER, stage, 0, -1)
        gradient, theta = (
            self._sum(self._place(node)[0], stage),
            self._parameters.get(
                Holding(Category.PARAMETERS, stage, int(self._program.base[node - self._program.compute]), -1)
            ),
        )
        parts = self._training.parts(stage)
        self._optimizer.update(theta, gradient, self._states.get(held), parts)  # which changes the momentum
        right(self, node)

    return wrong


def write_no_state(right: Any) -> Callable[..., Any]:
    return lambda self, stage, theta, gradient, *, keep: right(self, stage, theta, gradient, keep=False)


def use_older_state(right: Any) -> Callable[..., Any]:
    """Start each update from the state before the last one."""
    before: dict[tuple[Device, int], dict[str, Tensor]] = {}

    def wrong(self: Device, stage: int, theta: Tensor, gradient: Tensor, *, keep: bool) -> Tensor:
        state = self._states.get(optimizer_state(stage))
        now = {name: tensor.clone() for name, tensor in state.items()}
        for name, tensor in before.get((self, stage), {}).items():
            state[name].copy_(tensor)
        before[self, stage] = now
        found: Tensor = right(self, stage, theta, gradient, keep=keep)
        return found

    return wrong


def keep_stash_larger(right: Any) -> Callable[..., Any]:
    """Keep 20 bytes more from each forward to its backward."""

    def wrong(*given: Any, **named: Any) -> Any:
        y, kept = right(*given, **named)
        vars(kept.lent)["more"] = torch.zeros(20, dtype=torch.uint8)
        return y, kept

    return wrong


def add_twice(right: Any) -> Callable[..., Any]:
    def wrong(training: Any, kept: Any, theta: Tensor, above: Tensor | None, gradient: Tensor) -> Any:
        below = right(training, kept, theta, above, gradient)
        gradient.mul_(2)
        return below

    return wrong


def add_apart(right: Any) -> Callable[..., Any]:
    """Make a second vector of gradients, and add it to the first."""

    def wrong(training: Any, kept: Any, theta: Tensor, above: Tensor | None, gradient: Tensor) -> Any:
        below = right(training, kept, theta, above, own := torch.zeros_like(gradient))
        gradient += own
        return below

    return wrong


def round_gradients(right: Any) -> Callable[..., Any]:
    def wrong(training: Any, kept: Any, theta: Tensor, above: Tensor | None, gradient: Tensor) -> Any:
        below = right(training, kept, theta, above, gradient)
        gradient.copy_(gradient.to(torch.bfloat16))
        return below

    return wrong


def cast_nothing(right: Any) -> Callable[..., Any]:
    return lambda training, *given: right(replace(training, autocast=None), *given)


def add_nothing(right: Any) -> Callable[..., Any]:
    def wrong(training: Any, kept: Any, theta: Tensor, above: Tensor | None, gradient: Tensor) -> Any:
        return right(training, kept, theta, above, torch.zeros_like(gradient))

    return wrong


def read_newest(right: Any) -> Callable[..., Any]:
    """Read the newest version that a device has."""

    def wrong(self: Device, node: int) -> Tensor:
        stage, version = (int(c[node]) for c in (self._program.tasks.stage, self._program.tasks.version))
        newer = Holding(Category.PARAMETERS, stage, version + 1, -1)
        found: Tensor = self._parameters.get(newer) if newer in self._parameters else right(self, node)
        return found

    return wrong


def never_end(category: Category) -> Seed:
    """Return the seed of a device that keeps all values of a category."""
    kept: list[object] = []
    end = BufferStore.end

    def wrong(store: BufferStore[Any], holding: Holding) -> None:
        if holding.category == category:
            kept.append(store.get(holding))
        end(store, holding)

    def seed(patch: pytest.MonkeyPatch) -> None:
        kept.clear()
        patch.setattr(BufferStore, "end", wrong)

    return seed


# Faults of a transport


def transport(name: str, wrap: Callable[[Any], Callable[..., Any]], of: type = InProcess) -> Seed:
    """Return the seed of another method of a transport."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(of, name, wrap(getattr(of, name)))

    return seed


class Done(NamedTuple):
    """A message that its sender believes to be through."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


def skip(right: Any) -> Callable[..., Any]:
    return lambda self, message, tensor: Done(tensor)


def count_twice(right: Any) -> Callable[..., Any]:
    def wrong(self: InProcess, message: Message, tensor: Tensor) -> Pending:
        self.calls["send", (message.members[1],), tensor.nbytes] += 1
        pending: Pending = right(self, message, tensor)
        return pending

    return wrong


def scale(right: Any) -> Callable[..., Any]:
    """Send other values."""
    return lambda self, message, tensor: right(self, message, tensor * 1.001)


def send_rounded(right: Any) -> Callable[..., Any]:
    """Send values of half as many bits."""
    return lambda self, message, tensor: right(self, message, tensor.to(torch.float32).to(tensor.dtype))


def leave_out(right: Any) -> Callable[..., Any]:
    """Sum without the last member."""

    def wrong(self: Mailboxes, tensors: list[Tensor]) -> Tensor:
        total: Tensor = right(self, tensors[:-1])
        return total

    return wrong


def receive_itself(right: Any) -> Callable[..., Any]:
    """Take the sender's tensor for one's own."""

    def wrong(self: InProcess, message: Message, form: Any) -> Pending:
        self.calls["receive", (message.src,), form.nbytes] += 1
        return Done(self._room.take(message))

    return wrong


def keep_copies(right: Any) -> Callable[..., Any]:
    """Keep a second copy of all that is received."""
    kept: list[Tensor] = []

    def wrong(self: InProcess, message: Message, form: Any) -> Pending:
        pending: Pending = right(self, message, form)
        kept.append(pending.wait().clone())
        return pending

    return wrong


# Faults of ranks that share what is split


def gather_first(old: Program, first_stage: int = 0) -> Program:
    """Let the first gather of new parameters begin before the updates that make its shares; or before later stages'."""
    messages, edges = old.messages, old.edges
    gathers = (messages.op == Op.ALL_GATHER) & (messages.step >= 0)
    node = len(old.tasks) + int(np.flatnonzero(gathers)[0])
    made = (edges.after == node) & (edges.before >= old.compute) & (edges.before < len(old.tasks))
    made[made] = old.tasks.stage[edges.before[made]] >= first_stage
    before, after = (np.where(made, *pair) for pair in ((edges.after, edges.before), (edges.before, edges.after)))
    return replace(old, edges=Edges(before, after, edges.kind))


def hold_gathered_to_the_end(old: Program, own: Buffers, rows: Ints) -> dict[str, Ints]:
    """Hold the first parameters that were gathered as long as all shares."""
    row = next(row for row in rows if own.size[row] == own.size[rows].max())
    own.end[row] = 2 * (len(old.tasks) - 1) + 1
    return {"end": own.end}


def lose_padding(patch: pytest.MonkeyPatch) -> None:
    """Give shares the part of a stage's bytes, which need be no whole numbers."""
    patch.setattr(cases, "in_whole_numbers", lambda program, *_: program)


def update_another_share(right: Any) -> Callable[..., Any]:
    """Update the share of the next rank in the place of the device's own."""

    def wrong(self: Device, vector: Tensor, stage: int) -> Tensor:
        split = self._program.shard
        rank = (self._shares.rank(self._part.device, split) + 1) % split
        return self._shares.of(vector, stage, split, rank)

    return wrong


def keep_gathered(patch: pytest.MonkeyPatch) -> None:
    """Keep parameters that were gathered for a use."""
    kept: list[object] = []
    end = BufferStore.end

    def wrong(store: BufferStore[Any], holding: Holding) -> None:
        if holding.category == Category.PARAMETERS and holding.split == 1:
            kept.append(store.get(holding))
        end(store, holding)

    patch.setattr(BufferStore, "end", wrong)


def leave_pass_out(right: Any) -> Callable[..., Any]:
    """Let go of all shares of sums but the first pass'."""

    def wrong(self: Device, message: Message, tensor: Tensor) -> None:
        if gradients(message.stage, message.step, self._program.shard) not in self._gradients:
            right(self, message, tensor)

    return wrong


def begin_with_the_sum(right: Any) -> Callable[..., Any]:
    """Let every rank add its next pass to the sum of all, which is then there several times."""

    def wrong(self: Device, message: Message, tensor: Tensor) -> None:
        right(self, message, tensor)
        for stage, total in zip(message.covers, torch.split(tensor, self._numbers(message)), strict=True):
            self._gradients.get(gradients(stage, message.step)).copy_(total)

    return wrong


def give_nothing(right: Any) -> Callable[..., Any]:
    """Let the last member give zeros."""

    def wrong(self: InProcess, message: Message, given: Tensor, *others: Any) -> Pending:
        if self._device == message.members[-1] and message.content == Content.GRADIENT:
            given.zero_()
        found: Pending = right(self, message, given, *others)
        return found

    return wrong


STASH, LANDING, SUM, STATE, THETA = Category  # activations, communication, gradients, optimizer states, parameters

DIFFER = r"parameters  differ by .* in stage \d"
FORGOTTEN = rf"{DIFFER}, as those of updates without their states"
IN_FORWARD, IN_BACKWARD = (rf"allocator .*; \+[\d,]+ B in {task}\(" for task in "FB")
NARROW = {"model": "transformer", "dtype": "bfloat16"}
CAST = {"dtype": "float32", "autocast": "bf16"}
ADAM = {"optimizer": OPTIMIZERS["adam"]}
DDP: dict[str, Any] = {"replicas": 2, "m": 2}
ZERO_1, ZERO_2, ZERO_3 = ({**DDP, "zero": zero} for zero in (1, 2, 3))
HYBRID = {**ZERO_2, "shard": 2}
THREE = {**ZERO_2, "replicas": 3, "buckets": "none"}

FAULTS = [
    # held too long or dropped too early, in the program
    Fault(
        "gradients held to the end",
        "multi-dp",
        buffers(hold_to_the_end, SUM),
        r"holds gradients of stage 0, step 0 .* until",
    ),
    Fault(
        "gradients in turn held",
        "multi-cdp",
        buffers(hold_to_the_end, SUM),
        r"holds gradients of .*, last needed at p2p",
    ),
    Fault(
        "a version held",
        "pp-cdp",
        buffers(hold_one_to_the_end, THETA),
        r"holds parameters of stage 0, version 0 .* until",
    ),
    Fault("stashes held", "pp-cdp", buffers(hold_to_the_end, STASH), r"holds activations of .*, last needed at B"),
    Fault(
        "a state dropped",
        "zero-dp",
        buffers(end_at_first_reader, STATE),
        r"optimizer state of .* until F.*, last needed",
    ),
    Fault(
        "a version dropped",
        "multi-dp",
        buffers(end_at_first_reader, THETA),
        r"parameters of .* until F.*, last needed at",
    ),
    Fault(
        "a stash dropped",
        "single-cdp",
        buffers(end_as_it_begins, STASH),
        r"does not hold activations of .*, last needed at B",
    ),
    Fault("a state doubled", "multi-dp", buffers(hold_twice, STATE), r"parts in slot 0, .*, in optimizer: "),
    Fault("a landing doubled", "pp-cdp", buffers(hold_twice, LANDING), r"allocator .*; -512 B in p2p activation"),
    Fault("20 B more", "single-dp", buffers(hold_more(20), STASH), r"parts in slot 5, B.*, in activations: "),
    Fault("8 B less", "zero-cdp", buffers(hold_more(-8), THETA), r"parts in slot 0, .*, in parameters: "),
    # messages of the program
    Fault(
        "an activation dropped",
        "pp-cdp",
        drop(Content.ACTIVATION),
        r"law: boundaries cross by one message: F\(.* has not exactly one",
    ),
    Fault(
        "a gradient dropped",
        "multi-cdp",
        drop(Content.GRADIENT),
        r"law: gradients are summed once: U\(.* does not sum every",
    ),
    Fault(
        "a version not sent",
        "multi-cdp",
        drop(Content.PARAMETERS),
        r"law: versions exist before they are read: F\(.* never gets",
    ),
    Fault("a state not sent", "zero-cdp", drop(Content.STATE), r"law: states go from user to user: p2p state"),
    Fault(
        "an activation twice",
        "pp-cdp",
        repeat(Content.ACTIVATION),
        r"law: boundaries cross by one message: [FB]\(.* has not exactly one",
    ),
    Fault(
        "a version twice",
        "multi-cdp",
        repeat(Content.PARAMETERS),
        r"law: versions come once: p2p parameters\(t=0,j=1\)",
    ),
    Fault(
        "a sum twice", "multi-dp", repeat(Content.GRADIENT), r"law: gradients are summed once: U\(.* does not sum every"
    ),
    Fault(
        "a wrong version",
        "multi-cdp",
        messages(other_version),
        r"law: versions exist before they are read: F\(.* never gets",
    ),
    Fault(
        "another direction",
        "pp-cdp",
        messages(other_receiver),
        r"law: .* p2p activation\(t=0,i=0,j=0\) 1->0 does not go from its maker",
    ),
    Fault(
        "swapped contents",
        "pp-cdp",
        messages(swap_contents),
        r"law: .* p2p activation\(t=0,i=\d,j=0\) 0->1 does not go from its maker",
    ),
    Fault(
        "too large a message", "multi-cdp", messages(size(8)), r"too large: p2p gradient.* has \d+ B, and its tensors"
    ),
    Fault("too small a message", "multi-dp", messages(size(-8)), r"too small: all_reduce gradient.* has \d+ B"),
    # the versions that tasks read
    Fault("an older version read", "multi-dp", program(read_older), DIFFER),
    Fault("updates from the first version", "single-dp", program(start_from_the_first), DIFFER),
    Fault("another rule", "multi-cdp", another_rule, r"parameters  differ by .* in stage \d, as those of cdp-v1"),
    # devices
    Fault("gradients kept", "multi-dp", never_end(SUM), r"parts in slot \d, .*, in gradients: "),
    Fault("versions kept", "multi-cdp", never_end(THETA), r"parts in slot \d, .*, in parameters: "),
    Fault("stashes kept", "pp-cdp", never_end(STASH), r"parts in slot \d, .*, in activations: "),
    Fault("20 B more kept by forwards", "pp-cdp", passes("run_forward", keep_stash_larger), r"F.*, in activations: "),
    Fault("scratch in a forward", "pp-cdp", passes("run_forward", scratch_before(20_000)), r"F.*, in activations: "),
    Fault("scratch in an update", "multi-dp", device("_update", scratch_before(200_000)), r"allocator .*B in U\("),
    Fault("an update twice", "zero-dp", device("_update", update_twice), DIFFER),
    Fault("a state not written", "multi-dp", device("_updated", write_no_state), FORGOTTEN),
    Fault("a count not written", "multi-cdp", device("_updated", write_no_state), FORGOTTEN, ADAM),
    Fault("an older state", "single-cdp", device("_updated", use_older_state), DIFFER, {"steps": 3}),
    Fault("older moments", "multi-dp", device("_updated", use_older_state), DIFFER, ADAM | {"steps": 3}),
    Fault("a gradient twice", "single-dp", passes("run_backward", add_twice), DIFFER),
    Fault("a gradient skipped", "single-cdp", passes("run_backward", add_nothing), DIFFER),
    Fault("the newest version read", "pp-cdp", device("_theta", read_newest), DIFFER),
    Fault("a workspace in a forward", "pp-cdp", passes("run_forward", workspace_before(20_000)), IN_FORWARD),
    Fault("another of bfloat16", "pp-cdp", passes("run_forward", workspace_before(200_000)), IN_FORWARD, NARROW),
    Fault("another in a backward", "1f1b", passes("run_backward", workspace_before(200_000)), IN_BACKWARD, NARROW),
    Fault(
        "a workspace kept", "multi-dp", passes("run_forward", workspace_before(200, [])), r"allocator .*; \+", NARROW
    ),
    Fault("gradients apart", "1f1b", passes("run_backward", add_apart), r"B.*, in activations: ", NARROW),
    Fault("rounded gradients", "1f1b", passes("run_backward", round_gradients), DIFFER, CAST),
    Fault("no cast", "multi-cdp", passes("run_forward", cast_nothing), DIFFER, CAST),
    Fault("a wide update", "multi-dp", device("_updated", update_wide), DIFFER, NARROW),
    # transport
    Fault("a tensor for two", "pp-cdp", transport("_receive", receive_itself), r"allocator .*; -[\d,]+ B in p2p"),
    Fault(
        "scratch in a send",
        "multi-cdp",
        transport("_send", scratch_before(10**7)),
        r"allocator .*; \+10,000,\d+ B in p2p",
    ),
    Fault("a send skipped", "pp-cdp", transport("_send", skip), r"nothing came from device 0"),
    Fault("a send counted twice", "pp-cdp", transport("_send", count_twice), r"messages    8 simulated, 16 measured"),
    Fault("other values sent", "multi-cdp", transport("_send", scale), DIFFER),
    Fault("rounded values sent", "pp-cdp", transport("_send", send_rounded), DIFFER),
    Fault("a member left out of a sum", "multi-dp", transport("sum", leave_out, Mailboxes), DIFFER),
    Fault("received copies kept", "pp-cdp", transport("_receive", keep_copies), r"parts in slot \d, .*: "),
    # ranks that share what is split
    Fault("another rank's share", "dp", device("_own_share", update_another_share), DIFFER, ZERO_1),
    Fault(
        "a gather before its updates",
        "dp",
        program(gather_first),
        r"law: .* all_gather parameters\(t=0,j=0\) starts before U\(t=0,j=0\) on device 0",
        ZERO_1,
    ),
    Fault(
        "a gather between updates",
        "dp",
        program(partial(gather_first, first_stage=1)),
        r"law: .* all_gather parameters\(t=0,j=0\) starts before U\(t=0,j=1\) on device 0",
        {**ZERO_1, "buckets": "none"},
    ),
    Fault(
        "a reduction twice",
        "dp",
        repeat(Content.GRADIENT),
        r"law: .* reduce_scatter gradient\(t=1,j=0\) comes after all gradients",
        ZERO_2,
    ),
    Fault(
        "an all-reduce twice",
        "dp",
        repeat(Content.GRADIENT),
        r"law: .* all_reduce gradient\(t=1,j=0\), .* carry 34304 B for 17152 B",
        DDP,
    ),
    Fault(
        "a reduction left out",
        "dp",
        drop(Content.GRADIENT),
        r"law: .* 0 sums take the gradients \(t=1,j=0\) of device 0",
        ZERO_2,
    ),
    Fault("a pass left out", "dp", device("_take_shares", leave_pass_out), DIFFER, ZERO_2),
    Fault("a pass several times", "dp", device("_take_sums", begin_with_the_sum), DIFFER, DDP | {"reduce": "each"}),
    Fault("a rank that gives nothing", "dp", transport("_exchange", give_nothing), DIFFER, ZERO_3),
    Fault(
        "a sum across groups left out",
        "dp",
        drop(Content.GRADIENT),
        r"law: .* 0 sums take the gradients \(t=1,j=0\) of device [13]",
        HYBRID,
    ),
    Fault("padding lost", "dp", lose_padding, r"too small: reduce_scatter gradient.* has 2859 B, .* 2864 B", THREE),
    Fault(
        "a gather left out",
        "dp",
        drop(Content.PARAMETERS),
        r"law: versions exist before they are read: B\(.* never gets",
        ZERO_3,
    ),
    Fault(
        "a gather twice",
        "dp",
        repeat(Content.PARAMETERS),
        r"law: .* all_gather parameters\(t=0,j=1\) brings a device what it does not use",
        ZERO_3,
    ),
    Fault("gathered parameters kept", "dp", keep_gathered, r"parts in slot \d, .*, in parameters: ", ZERO_3),
    Fault(
        "gathered parameters held",
        "dp",
        buffers(hold_gathered_to_the_end, THETA),
        r"device \d holds parameters of stage 0, version 0 .* until U\(.*, last needed at F\(",
        ZERO_3,
    ),
    Fault("reduced gradients kept", "dp", never_end(SUM), r"parts in slot \d, .*, in gradients: ", ZERO_2),
    Fault("shares doubled", "dp", buffers(hold_twice, STATE), r"parts in slot 0, .*, in optimizer: ", ZERO_1),
]
