"""A run as Perfetto's own protobuf, in which tracks have parents, an order and units."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np

from cdpsim.draw import scene
from cdpsim.errors import RequestError
from cdpsim.export.labels import message_labels, place, said, task_labels
from cdpsim.export.tracks import Counters, Tracks, counters, tracks
from cdpsim.files.progress import ticker
from cdpsim.numeric.columns import Ints
from cdpsim.trace import Trace

MOST_EVENTS = 2_000_000
_PACKETS_AT_ONCE = 10_000
_ROOT = 1  # tracks are numbered: the root, then processes, threads, counters


def protobuf(trace: Trace) -> Iterator[bytes]:
    """Give a trace as the content of a .pftrace file, some packets at a time."""
    scene.refuse_empty(trace)
    events = 2 * (len(trace.tasks["start"]) + len(trace.messages["start"])) + len(trace.memory["time"])
    if events > MOST_EVENTS:
        problem = f"has {events:,} events for .pftrace, which takes {MOST_EVENTS:,} at most"
        raise RequestError("trace", f"{problem}; write a .json file, or give fewer --steps")
    perfetto = messages()
    return _serialized(_packets(perfetto, trace, tracks(trace), counters(trace)), events)


def messages() -> Any:
    """Give Perfetto's own definitions of what a file consists of; refuse where the extra is not installed."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError:
        problem = "is not installed; pip install 'cdpsim[perfetto]', or write a .json file"
        raise RequestError("perfetto", problem) from None
    return perfetto_trace_pb2


def _serialized(packets: Iterator[Any], events: int) -> Iterator[bytes]:
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    done = ticker(events, "write")
    while some := list(islice(packets, _PACKETS_AT_ONCE)):
        builder = TraceProtoBuilder()
        builder.trace.packet.extend(some)
        yield builder.serialize()
        done(len(some))
    done(0)


def _packets(perfetto: Any, trace: Trace, shown: Tracks, held: Counters) -> Iterator[Any]:
    described = _descriptors(perfetto, trace, shown), _counter_descriptors(perfetto, trace, shown, held)
    for descriptor in chain(*described):
        yield perfetto.TracePacket(trusted_packet_sequence_id=1, track_descriptor=descriptor)
    for time, event in chain(_slices(perfetto, trace, shown), _counts(perfetto, shown, held)):
        yield perfetto.TracePacket(trusted_packet_sequence_id=1, timestamp=time, track_event=event)


def _first_thread(shown: Tracks) -> int:
    return _ROOT + 1 + len(shown.processes)


def _first_counter(shown: Tracks) -> int:
    return _first_thread(shown) + len(shown.threads)


def _descriptors(perfetto: Any, trace: Trace, shown: Tracks) -> Iterator[Any]:
    """The run with its processes, which are shown in their order, and a track for each thread."""
    ordered = {"child_ordering": perfetto.TrackDescriptor.EXPLICIT}
    request = msgspec.json.encode(dict(trace.request)).decode()
    yield perfetto.TrackDescriptor(uuid=_ROOT, name=scene.plain_title(trace), description=request, **ordered)
    for k, name in enumerate(shown.processes):
        place = {"parent_uuid": _ROOT, "sibling_order_rank": k}
        yield perfetto.TrackDescriptor(uuid=_ROOT + 1 + k, name=name, **place, **ordered)
    for k, thread in enumerate(shown.threads):
        place = {"parent_uuid": _ROOT + 1 + thread.process, "sibling_order_rank": k}
        yield perfetto.TrackDescriptor(uuid=_first_thread(shown) + k, name=thread.name, **place)


def _counter_descriptors(perfetto: Any, trace: Trace, shown: Tracks, held: Counters) -> Iterator[Any]:
    """A counter for each memory curve, below its device's threads; those of a category are drawn to one scale."""
    for k, (device, name) in enumerate(zip(held.device.tolist(), held.category, strict=True)):
        unit = (
            {"unit_name": "stages' worth"} if trace.in_slots else {"unit": perfetto.CounterDescriptor.UNIT_SIZE_BYTES}
        )
        counter = perfetto.CounterDescriptor(y_axis_share_key=name, **unit)
        place = {"parent_uuid": _ROOT + 1 + device, "sibling_order_rank": len(shown.threads) + k}
        yield perfetto.TrackDescriptor(uuid=_first_counter(shown) + k, name=name, counter=counter, **place)


def _counts(perfetto: Any, shown: Tracks, held: Counters) -> Iterator[tuple[int, Any]]:
    """When counters change, and to what."""
    what = perfetto.TrackEvent.TYPE_COUNTER
    track = (held.curve + _first_counter(shown)).tolist()
    for uuid, time, size in zip(track, held.time.tolist(), held.size.tolist(), strict=True):
        yield time, perfetto.TrackEvent(type=what, track_uuid=uuid, counter_value=size)


def _slices(perfetto: Any, trace: Trace, shown: Tracks) -> Iterator[tuple[int, Any]]:
    """Begins and ends of slices; every arrow has a number of its own, which the two slices that it joins begin with."""
    leaving, arriving = _by_slice(shown.source), _by_slice(shown.target)
    begin, end = _begins(perfetto, trace, shown), perfetto.TrackEvent.TYPE_SLICE_END
    starts, ends = shown.start.tolist(), shown.end.tolist()
    track = (shown.thread + _first_thread(shown)).tolist()
    for number in _in_time(shown):
        k = number >> 1
        if number & 1:
            yield ends[k], perfetto.TrackEvent(type=end, track_uuid=track[k])
        else:
            event = begin(k)
            event.track_uuid = track[k]
            event.flow_ids.extend(leaving.get(k, ()))
            event.terminating_flow_ids.extend(arriving.get(k, ()))
            yield starts[k], event


def _in_time(shown: Tracks) -> list[int]:
    """Begins (twice a slice's number) and ends (one more) in time; at one time, first ends of what began before."""
    place = np.empty(len(shown.order), dtype=np.int64)
    place[shown.order] = np.arange(len(place))
    number = 2 * np.arange(len(place))
    event = np.concatenate([number, number + 1])
    time = np.concatenate([shown.start, shown.end])
    begins_here = np.concatenate([np.ones(len(place), dtype=bool), shown.end == shown.start])
    order: list[int] = event[np.lexsort((event & 1, place[event >> 1], begins_here, time))].tolist()
    return order


def _by_slice(ends: Ints) -> dict[int, list[int]]:
    """The numbers of arrows, from 1 on, by the slices at one of their ends."""
    arrows: dict[int, list[int]] = {}
    for number, k in enumerate(ends.tolist(), start=1):
        arrows.setdefault(k, []).append(number)
    return arrows


def _begins(perfetto: Any, trace: Trace, shown: Tracks) -> Callable[[int], Any]:
    """What makes the event that begins a slice, from what many slices have in common and its own numbers."""
    count = len(trace.tasks["start"])
    parts = []
    for labels in (task_labels(trace), message_labels(trace)):
        common = []
        for number, i, j in labels.different:
            sort = labels.sorts[number]
            name, begins = f"{sort.before}{place(i, j)}{sort.after}", perfetto.TrackEvent.TYPE_SLICE_BEGIN
            event = perfetto.TrackEvent(type=begins, name=name, categories=[sort.category])
            arguments = [*sort.arguments.items(), *said(i, j)]
            event.debug_annotations.extend([_annotation(perfetto, *one) for one in arguments])
            common.append(event)
        numbers = {name: column.tolist() for name, column in labels.numbers.items()}
        parts.append((common, labels.which.tolist(), numbers))
    link = shown.link.tolist()

    def begin(k: int) -> Any:
        is_message = k >= count
        (common, which, numbers), row = parts[is_message], k - count * is_message
        event = perfetto.TrackEvent()
        event.CopyFrom(common[which[row]])
        own = {name: column[row] for name, column in numbers.items()}
        if is_message:
            own["dst"] = shown.links[link[row]].dst
        event.debug_annotations.extend([_annotation(perfetto, *one) for one in own.items() if one != ("src", -1)])
        return event

    return begin


def _annotation(perfetto: Any, name: str, value: int | str) -> Any:
    kind = "string_value" if isinstance(value, str) else "int_value"
    return perfetto.DebugAnnotation(name=name, **{kind: value})
