"""Curves over time: memory, traffic and versions of one trace in detail or of several; and the times of steps."""

from cdpsim.draw.curves.memory import memory_over_time
from cdpsim.draw.curves.step_times import step_durations
from cdpsim.draw.curves.traffic import traffic_over_time
from cdpsim.draw.curves.versions import versions_over_time

__all__ = ["memory_over_time", "step_durations", "traffic_over_time", "versions_over_time"]
