"""Two interpreters of a program: the same times from both."""

from collections.abc import Callable

from cdpsim.errors import RequestError, choose
from cdpsim.numeric.columns import Times
from cdpsim.program import Program
from cdpsim.timing import engine
from cdpsim.timing.costs import Costs

EngineFunction = Callable[[Program, Costs], tuple[Times, Times]]  # returns the start and the end of every node


def _run_by_simpy(program: Program, costs: Costs) -> tuple[Times, Times]:
    from cdpsim.timing.engine import discrete  # simpy costs 40 ms to import

    return discrete.run_by_events(program, costs)


ENGINES: dict[str, EngineFunction] = {"fast": engine.run_by_longest_paths, "simpy": _run_by_simpy}


def find_engine(name: str, contention: str = "none") -> EngineFunction:
    """Return the engine of that name; `auto` is the fast one for fixed costs without contention, else SimPy."""
    engine = choose("engine", name, ["auto", *ENGINES])
    if contention == "none":
        return ENGINES["fast" if engine == "auto" else engine]
    if engine == "fast":
        raise RequestError("engine", f"fast cannot let messages share links ({contention}); take simpy, or auto")
    return ENGINES["simpy"]
