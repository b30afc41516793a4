"""Folding of replicas: where all are alike, the program of one stands for all, and counts for as many."""

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.program import Program, once_a_program
from cdpsim.timing.collective_times import are_alike


@once_a_program
def are_replicas_alike(program: Program, cluster: Cluster) -> bool:
    """Return whether all replicas are alike on a cluster: their devices, and the links that their messages take."""
    cluster = cluster.sized(program.all_devices)
    if not cluster.has_alike_devices(program.all_devices):
        return False
    if not (cluster.is_joined or cluster.links):
        return True
    return _are_laid_out_alike(program, cluster.laid_out) or _have_alike_ways(program, cluster)


@once_a_program
def _are_laid_out_alike(program: Program, cluster: Cluster) -> bool:
    """Return whether replicas have alike ways in a layout, so that they have them whatever these cost."""
    return _have_alike_ways(program, cluster)


def _have_alike_ways(program: Program, cluster: Cluster) -> bool:
    """Return whether the messages of all replicas take alike links."""
    first = program.devices * np.arange(program.fold)[:, None]
    links = cluster.link_costs(*(ends + first for ends in program.messages.ways[:2]))
    same = all((cost == cost[0]).all() for cost in links)
    return same and all(are_alike(cluster, program.alike_groups(group)) for group in range(len(program.groups)))
