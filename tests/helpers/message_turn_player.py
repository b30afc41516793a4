"""A player, event by event, of messages that take their devices' lanes or streams: `streams` must come to its times.

It is written from the rules alone, and takes dependencies from a program where everything overlaps. A device has a list
of things to do. It sends something for a message, which takes the message's time; or it receives the message, which
takes as long from when the device has come to it and the message has begun. Messages of data ranks have queues besides,
as where everything overlaps. No node waits along any other edge of a stream.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from cdpsim.program import EdgeKind, Op, Stream
from cdpsim.runs import Run


class Doing(NamedTuple):
    """One thing that a device does: a task, or its part in a message."""

    what: str  # task, send or receive
    node: int


_Key = tuple[float, int, bool, tuple[float, ...], int]  # place, steps, whether collective, place in a queue, node


def play(run: Run, overlaps: Sequence[str]) -> tuple[dict[int, float], dict[int, float]]:
    """Return when every node of a run without streams starts and ends if its messages take their devices' time."""
    return TurnPlayer(run, overlaps).times()


class TurnPlayer:
    """The dependencies, and what each device does in which order; a clock is a number, or an array of them."""

    zero: Any = 0.0

    @staticmethod
    def latest(*times: Any) -> Any:
        """Return the latest of some times."""
        return max(times)

    def __init__(self, run: Run, overlaps: Sequence[str]) -> None:
        self.program, self.overlaps, self.count = run.program, overlaps, len(run.program.tasks)
        self.duration: list[Any] = run.costs.duration.tolist()
        self.release = dict(zip((task for task, _ in run.program.releases), run.costs.release.tolist(), strict=True))
        self.needs: dict[int, set[int]] = defaultdict(set)
        self.data: dict[int, set[int]] = defaultdict(set)  # needs but for those of queues
        self.needed: dict[int, set[int]] = defaultdict(set)
        edges = run.program.edges
        for before, after, kind in zip(edges.before.tolist(), edges.after.tolist(), edges.kind.tolist(), strict=True):
            self.needs[after].add(before)
            if kind != EdgeKind.STREAM:
                self.data[after].add(before)
                self.needed[before].add(after)
        starts = run.program.lane_start.tolist()
        self.lanes = [run.program.lane_tasks[a:b].tolist() for a, b in pairwise(starts)]
        self.lane_of = {task: k for k, lane in enumerate(self.lanes) for task in lane}
        self.turn = self._turns()
        self.read: dict[int, Any] = {}  # when a stream has received all for a task
        self.rows = [row for k in range(len(self.lanes)) for row in self._rows(k)]
        self.free: list[Any] = [self.zero] * len(self.rows)
        self.senders = Counter(doing.node for _, row in self.rows for doing in row if doing.what == "send")
        self.may_go: dict[int, list[Any]] = defaultdict(list)  # when senders have come to a message
        self.start: dict[int, Any] = {}
        self.end: dict[int, Any] = {}

    def ends(self, message: int) -> list[tuple[int, str]]:
        """Return the devices of a message, and what each does for it: a device that gives something sends."""
        messages, row = self.program.messages, message - self.count
        src, dst = int(messages.src[row]), int(messages.dst[row])
        if messages.op[row] == Op.P2P:
            return [(src, "send"), (dst, "receive")]
        gives: Callable[[int], bool] = (lambda d: d == src) if messages.op[row] == Op.BROADCAST else lambda d: True
        return [(int(d), "send" if gives(int(d)) else "receive") for d in self.program.groups[dst]]

    def _turns(self) -> dict[int, tuple[int, int]]:
        """Return how many tasks come before each node, and how many other nodes behind them, on its longest way."""
        waits = {node: set(self.data[node]) for node in range(self.program.nodes)}
        for lane in self.lanes:
            for before, after in pairwise(lane):
                waits[after].add(before)
        turn: dict[int, tuple[int, int]] = {}
        for node in TopologicalSorter(waits).static_order():
            ways = [
                (tasks + (b < self.program.compute), more + (b >= self.program.compute))
                for b in waits[node]
                for tasks, more in [turn[b]]
            ]
            turn[node] = max(ways, default=(0, 0))
        return turn

    def _in_queue(self, message: int) -> tuple[float, ...]:
        """Return what sorts a queue: turns, sums before gathers, and of gathers the one first that is read first.

        A sum across groups has the turn of those inside. Of several versions that one communication makes, the last one
        goes first: with that workers go on.
        """
        messages, row = self.program.messages, message - self.count
        stream = messages.stream[row]
        if stream < 0:
            return ()
        columns = (messages.stage, messages.step, messages.dst, messages.op)
        alike = [other for other in range(len(messages)) if all(c[other] == c[row] for c in columns)]
        versions = alike if messages.op[row] == Op.ALL_GATHER and not self.program.state.joins else [row]
        across = stream == Stream.ACROSS
        inside = [node for node in self.data[message] if node >= self.count]
        turn = max(self.turn[node] for node in (inside if across else [other + self.count for other in versions]))
        read = min((self.turn[node] for node in self.needed[message] if node < self.program.compute), default=(inf, 0))
        return *turn, stream == Stream.GATHER, across, *read, -versions.index(row)

    def _nearest(self, message: int, device: int, ways: dict[int, set[int]]) -> tuple[int, list[tuple[int, int]]]:
        """Return the nearest tasks of a device along those ways: the steps to them, and their lanes and places."""
        reached, steps = {message}, 0
        while reached:
            steps += 1
            reached = {other for node in reached for other in ways[node]}
            mine = [task for task in reached if task in self.lane_of and self.program.tasks.device[task] == device]
            if mine:
                return steps, [(self.lane_of[task], self.lanes[self.lane_of[task]].index(task)) for task in mine]
            reached = {node for node in reached if node >= self.program.compute}
        return 0, []

    def _rows(self, lane: int) -> list[tuple[str, list[Doing]]]:
        """Return the rows of a lane: its tasks with messages between them, or beside them in rows of their own."""
        tasks = self.lanes[lane]
        device = int(self.program.tasks.device[tasks[0]])
        word = self.overlaps[device]
        if word == "full":
            return [("lane", [Doing("task", task) for task in tasks])]
        placed: list[tuple[_Key, Doing]] = []
        for message in range(self.count, self.count + len(self.program.messages)):
            together = self.program.messages.op[message - self.count] != Op.P2P
            for end, what in self.ends(message):
                if end != device:
                    continue
                steps, near = self._nearest(message, device, self.data if what == "send" else self.needed)
                if what == "send":
                    place, queued = max(near)[1] + 0.75 if near else -0.5, self._in_queue(message)
                    key = place, 1 if queued else steps, bool(together), queued, message
                    placed.append((key, Doing(what, message)))
                elif near:
                    placed.append(((min(near)[1] - 0.125, -steps, bool(together), (), message), Doing(what, message)))
        tasked: list[tuple[_Key, Doing]] = [
            ((float(place), 0, False, (), 0), Doing("task", task)) for place, task in enumerate(tasks)
        ]
        whole = [doing for _, doing in sorted(placed + tasked)]
        if word == "none":
            return [("lane", whole)]
        beside = [(what, [doing for doing in whole if doing.what in ("task", what)]) for what in ("send", "receive")]
        self.read.update(dict.fromkeys(tasks))
        return [("lane", [Doing("task", task) for task in tasks]), *beside]

    def times(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Time the nodes and rows that can be timed, again and again, until all are; return (start, end)."""
        at, moved = [0] * len(self.rows), True
        while moved:
            moved = False
            for node in range(self.program.nodes):
                if node not in self.start and node not in self.lane_of and self._is_ready(node):
                    self._time(node, self.latest(self.zero, *self.may_go[node]))
                    moved = True
            for k, (kind, row) in enumerate(self.rows):
                while at[k] < len(row) and self._do(kind, k, row[at[k]]):
                    at[k] += 1
                    moved = True
        return self.start, self.end

    def _is_ready(self, node: int) -> bool:
        """Return whether all that a node needs has been timed, and all its senders have come to it."""
        return all(before in self.end for before in self.needs[node]) and len(self.may_go[node]) == self.senders[node]

    def _time(self, node: int, earliest: Any) -> None:
        """Start a node when all that it needs has ended."""
        self.start[node] = max([earliest, *(self.end[before] for before in self.needs[node])])
        self.end[node] = self.start[node] + self.duration[node]

    def _do(self, kind: str, k: int, doing: Doing) -> bool:
        """Do the next thing in a row, and return whether it can be timed already."""
        node, now = doing.node, self.free[k]
        if doing.what == "send":
            self.may_go[node].append(now)
            self.free[k] = now + self.duration[node]
        elif doing.what == "receive":
            if node not in self.start:
                return False
            self.free[k] = self.latest(now, self.start[node]) + self.duration[node]
        elif kind == "receive":
            self.read[node] = now
        elif kind == "send":
            if node not in self.end:
                return False
            self.free[k] = self.latest(now, self.end[node])
        else:
            read = self.read.get(node, self.zero)
            if read is None or not self._is_ready(node):
                return False
            self._time(node, self.latest(now, read, self.zero + self.release.get(node, 0.0)))
            self.free[k] = self.end[node]
        return True
