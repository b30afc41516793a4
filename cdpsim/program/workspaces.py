"""What kernels of libraries take beside tensors, as buffers: on a device for good, and while its tasks run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cdpsim.cluster.topology import Workspace
from cdpsim.program import Category, Kind, Program, once_a_program


@once_a_program
def with_workspaces(program: Program, workspaces: Sequence[Workspace], last: int) -> Program:
    """Return the program with the workspaces of its devices, as activations; `last` is the node that ends last."""
    tasks, node, unlike = program.tasks, np.arange(program.compute), [*dict.fromkeys(workspaces)]
    number, stage = np.array([unlike.index(each) for each in workspaces]), tasks.stage[node]
    sizes = np.array([each.during(program.n, split=program.splits) for each in unlike])
    size = sizes[number[tasks.device[node]], tasks.kind[node] - Kind.F, stage]
    kept = np.array([each.kept for each in unlike])[number]
    rows, always = np.flatnonzero(size), np.flatnonzero(kept)
    new = {
        "category": np.full(len(always) + len(rows), Category.ACTIVATIONS),
        "device": np.append(always, tasks.device[rows]),
        "stage": np.append(0 * always, stage[rows]),
        "version": np.append(0 * always, tasks.step[rows]),
        "size": np.append(kept[always], size[rows]),
        "begin": np.append(0 * always - 1, 2 * rows),
        "end": np.append(0 * always + 2 * last, 2 * rows) + 1,
    }
    old = {name: getattr(program.buffers, name) for name in new}
    columns = {name: np.append(old[name], column).astype(old[name].dtype) for name, column in new.items()}
    return replace(program, buffers=replace(program.buffers, **columns))
