"""A player, event by event, of devices that post messages into streams: streams and engines must come to its times.

It is written from the rules alone. It takes dependencies from a program without streams, and does all the rest again
with dicts, lists and the standard library's topological sort. No node waits along an edge of a stream: devices keep
queues and look at the heads of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise

from cdpsim.program import Content, Op, Program
from cdpsim.runs import Run

Place = tuple[Fraction, Fraction, int, int]  # moment, wave, whether collective, number among those


class Queues:
    """The dependencies, and the places of all messages in their devices' queues."""

    def __init__(self, program: Program, overlaps: Sequence[str], defer: bool) -> None:
        self.program, self.overlaps, self.count = program, overlaps, len(program.tasks)
        self.needs: dict[int, set[int]] = {node: set() for node in range(program.nodes)}
        edges = program.edges
        for before, after in zip(edges.before.tolist(), edges.after.tolist(), strict=True):
            self.needs[after].add(before)
        for before, after in zip(*(ends.tolist() for ends in program.lane_edges), strict=True):
            self.needs[after].add(before)
        if defer:
            self._defer()
        self.moment, self.wave = self._unit_run()
        self.place = self._places()

    def is_task(self, node: int) -> bool:
        """Return whether a node takes a slot."""
        return node < self.program.compute

    def is_update(self, node: int) -> bool:
        """Return whether a node is an update with a place in a lane."""
        return self.program.compute <= node < len(self.program.lane_tasks)

    def comes_first(self, task: int, message: int) -> bool:
        """Return whether a task has its turn before a message.

        Messages of a slot come before its tasks; before an update those of its wave and of earlier ones.
        """
        if self.is_task(task):
            return self.moment[task] < self.moment[message]
        return (self.moment[task], self.wave[task]) < (self.moment[message], self.wave[message])

    def _defer(self) -> None:
        """Let each boundary need the end of the task before its reader, which is found from the message's content."""
        messages, program = self.program.messages, self.program
        bounds = program.lane_start.tolist()
        lanes = [program.lane_tasks[low:high].tolist() for low, high in pairwise(bounds)]
        before = {task: earlier for lane in lanes for earlier, task in pairwise(lane)}
        for row in range(len(messages)):
            content, j = messages.content[row], int(messages.stage[row])
            if content in (Content.ACTIVATION, Content.ACTIVATION_GRADIENT):
                phase = j + 1 if content == Content.ACTIVATION else 2 * program.n - j
                first = int(program.find_pass(messages.step[row], messages.micro_batch[row])) * program.phases
                if first + phase in before:
                    self.needs[self.count + row].add(before[first + phase])

    def _unit_run(self) -> tuple[dict[int, Fraction], dict[int, Fraction]]:
        """Return when nodes would begin if only tasks took a slot, and after how many messages of that time."""
        release = {task: share * self.program.phases for task, share in self.program.releases}
        moment: dict[int, Fraction] = {}
        wave: dict[int, Fraction] = {}
        half = Fraction(1, 2)  # of a message: an update is behind what it waits for, and none itself
        for node in TopologicalSorter(self.needs).static_order():
            over = {before: moment[before] + self.is_task(before) for before in self.needs[node]}
            moment[node] = max([*over.values(), release.get(node, Fraction(0))])
            now = [
                wave[before] + (before >= self.count) + half * self.is_update(before)
                for before in over
                if moment[before] == moment[node]
            ]
            wave[node] = max(now, default=Fraction(0))
        return moment, wave

    def _places(self) -> dict[int, Place]:
        messages, place = self.program.messages, {}
        pairs: dict[tuple[Fraction, Fraction, int, int], int] = defaultdict(int)
        for row in range(len(messages)):
            node = self.count + row
            at = self.moment[node], self.wave[node]
            if messages.op[row] == Op.P2P:
                pair = (*at, int(messages.src[row]), int(messages.dst[row]))
                place[node] = (*at, 0, pairs[pair])
                pairs[pair] += 1
            else:
                place[node] = (*at, 1, row)
        return place

    def devices(self, node: int) -> list[int]:
        """Return the devices of a message that have a stream."""
        messages, row = self.program.messages, node - self.count
        single = messages.op[row] == Op.P2P
        ends = [messages.src[row], messages.dst[row]] if single else self.program.groups[messages.dst[row]]
        return [int(device) for device in ends if self.overlaps[device] != "full"]


def play(run: Run, overlaps: Sequence[str], defer: bool) -> tuple[list[float], list[float]]:
    """Return when every node of a run without streams starts and ends if devices have streams."""
    queues = Queues(run.program, overlaps, defer)
    return _Play(queues, run).times()


class _Play:
    """The clock, the nodes under way, and the rest of each device's queue."""

    def __init__(self, queues: Queues, run: Run) -> None:
        self.queues, self.duration = queues, run.costs.duration.tolist()
        self.release = dict(zip((task for task, _ in run.program.releases), run.costs.release.tolist(), strict=True))
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.messages: dict[int, set[int]] = defaultdict(set)  # by device, not yet over
        self.tasks: dict[int, set[int]] = defaultdict(set)
        for node in queues.place:
            for device in queues.devices(node):
                self.messages[device].add(node)
        for task, device in enumerate(run.program.tasks.device.tolist()[: len(run.program.lane_tasks)]):
            if queues.overlaps[device] == "none":
                self.tasks[device].add(task)

    def may_start(self, node: int) -> bool:
        """Return whether all that a node needs has ended, and all that its devices have before it in their queues."""
        queues = self.queues
        if not queues.needs[node] <= self.end.keys():
            return False
        if queues.is_task(node) or queues.is_update(node):
            device = int(queues.program.tasks.device[node])
            mine = self.messages[device] if queues.overlaps[device] == "none" else set()
            return all(queues.comes_first(node, other) for other in mine)
        if node < queues.count:
            return True
        place = queues.place[node]
        return not any(
            any(queues.place[other] < place for other in self.messages[device])
            or any(queues.comes_first(task, node) for task in self.tasks[device])
            for device in queues.devices(node)
        )

    def finish(self, node: int, now: float) -> None:
        """End a node, and take it out of all queues."""
        self.end[node] = now
        for waiting in (*self.messages.values(), *self.tasks.values()):
            waiting.discard(node)

    def times(self) -> tuple[list[float], list[float]]:
        """Play until all nodes have ended; return (start, end)."""
        left, under_way = set(self.queues.needs), [(time, -1) for time in self.release.values()]
        under_way.sort()
        now: float = 0
        while left or under_way:
            begun = [node for node in left if self.release.get(node, 0) <= now and self.may_start(node)]
            left -= set(begun)
            for node in begun:
                self.start[node] = now
                if self.duration[node]:
                    heappush(under_way, (now + self.duration[node], node))
                else:
                    self.finish(node, now)
            if not begun:
                assert under_way, "all nodes wait"
                now, node = heappop(under_way)
                if node >= 0:
                    self.finish(node, now)
                while under_way and under_way[0][0] == now:
                    _, other = heappop(under_way)
                    if other >= 0:
                        self.finish(other, now)
        nodes = range(len(self.start))
        return [self.start[node] for node in nodes], [self.end[node] for node in nodes]
