"""Two interpreters of a program: the same times from both."""

from collections.abc import Callable

from cdpsim.errors import RequestError, choose
from cdpsim.numeric.columns import Times
from cdpsim.program import Program
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import fast

Engine = Callable[[Program, Costs], tuple[Times, Times]]  # the start and the end of every node


def _discrete(program: Program, costs: Costs) -> tuple[Times, Times]:
    from cdpsim.timing.engine import discrete  # simpy costs 40 ms to import

    return discrete.run(program, costs)


ENGINES: dict[str, Engine] = {"fast": fast.run, "simpy": _discrete}


def find_engine(name: str, contention: str = "none") -> Engine:
    """The engine of that name; `auto` is the fast one for fixed costs without contention, else SimPy."""
    asked = choose("engine", name, ["auto", *ENGINES])
    if contention == "none":
        return fast.run if asked == "auto" else ENGINES[asked]
    if asked == "fast":
        raise RequestError("engine", f"fast cannot let messages share links ({contention}); take simpy, or auto")
    return ENGINES["simpy"]
