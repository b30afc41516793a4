"""Arrivals of messages by SimGrid: a script for a Python that has SimGrid's module, not for this package's Python.

It reads patterns of traffic as JSON (`tests/helpers/traffic.py` writes them) and prints arrivals with SimGrid's
version:

    /usr/bin/python3 tests/helpers/simgrid_arrivals.py < patterns.json > arrivals.json

SimGrid's flow model CM02 is max-min fair only among flows of equal total latency (it weighs them by it), with its
windows and reverse traffic turned off, and only on links that have some latency. So all of a pattern's routes get one
total: what a route lacks comes from a link of its own that no other shares, and a message with less latency than others
begins later. Its lazy way of updating rates, the default, leaves some flows at rates that are not fair any more (3.32,
eight of our patterns, by up to a factor of five), so the script sets full updates.
"""

import json
import sys
from typing import Any

import simgrid  # type: ignore[import-not-found, unused-ignore]
from simgrid import Actor, Comm, Engine, Host, Link, LinkInRoute, NetZone, this_actor

TINY = 1e-9
SETTINGS = (
    *("network/model:CM02", "network/optim:Full"),
    *("network/TCP-gamma:0", "network/crosstraffic:0", "network/weight-S:0"),
)


def lay(zone: NetZone, number: int, pattern: dict[str, Any]) -> float:
    """Lay the links and routes of one pattern; return the total latency of each route."""
    links = []
    for k, bandwidth in enumerate(pattern["bandwidth"]):
        link = zone.create_link(f"{number}-{k}", bandwidth)
        link.set_latency(TINY)
        links.append(link.seal())
    total: float = max([message["latency"] for message in pattern["messages"]] + [1e-7])
    laid = set()
    for message in pattern["messages"]:
        ends = message["src"], message["dst"]
        if ends in laid:
            continue
        laid.add(ends)
        rest = zone.create_link(f"{number}-{ends}", 1e15)
        rest.set_latency(total - TINY * len(message["route"]))
        rest.set_sharing_policy(Link.SharingPolicy.FATPIPE, None)
        route = [LinkInRoute(links[edge]) for edge in message["route"]] + [LinkInRoute(rest.seal())]
        points = [Host.by_name(f"{number}-host-{end}").netpoint for end in ends]
        zone.add_route(points[0], points[1], None, None, route, False)
    return total


def send(patterns: list[Any], totals: list[float], arrived: list[list[float]]) -> None:
    """Send every message at its time, and wait for all."""
    due = []
    for number, pattern in enumerate(patterns):
        arrived.append([0.0] * len(pattern["messages"]))
        for row, message in enumerate(pattern["messages"]):
            due.append((message["time"] + message["latency"], number, row, message))
    under_way = []
    for time, number, row, message in sorted(due, key=lambda one: one[:3]):
        if time > Engine.clock:
            this_actor.sleep_until(time)
        source, target = (Host.by_name(f"{number}-host-{message[end]}") for end in ("src", "dst"))
        under_way.append((Comm.sendto_async(source, target, message["size"]), number, row))
    for comm, number, row in under_way:
        comm.wait()
        arrived[number][row] = comm.finish_time - totals[number]


def main() -> None:
    """Serve the patterns on standard input."""
    patterns = json.load(sys.stdin)
    engine = Engine(["arrivals", *(f"--cfg={setting}" for setting in SETTINGS), "--log=root.thres:error"])
    zone = NetZone.create_full_zone("all")
    for number, pattern in enumerate(patterns):
        ends = {message[end] for message in pattern["messages"] for end in ("src", "dst")}
        for end in sorted(ends):
            zone.create_host(f"{number}-host-{end}", 1e9).seal()
    first = zone.create_host("sender", 1e9).seal()
    totals = [lay(zone, number, pattern) for number, pattern in enumerate(patterns)]
    zone.seal()
    arrived: list[list[float]] = []
    Actor.create("sender", first, send, patterns, totals, arrived)
    engine.run()
    json.dump({"simgrid": simgrid.simgrid_version, "arrivals": arrived}, sys.stdout, indent=0)


main()
