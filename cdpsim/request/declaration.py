"""The row of an option: its type, and the functions by which rows record values."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from cdpsim import presets
from cdpsim.schedules import Schedule

Recorded = Callable[[Any], object]  # of a request


@dataclass(frozen=True)
class Option:
    """The row of an option: what stands for its value in help (nothing for a switch), its help, and its default.

    `usual` says the default in words where `help` does not. A schedule takes the option if it `applies`; the others
    accept their `own` value, by the number of stages. `known` are names beside files and numbers; a `Literal` type has
    them itself. A record has what `record` finds in a request, without it the option as given; not the default unless
    it is `kept`.
    """

    value: str
    help: str
    _: KW_ONLY
    default: Any = None
    usual: str = ""
    brief: bool = False  # whether short help explains it
    typed: bool = True  # whether a command line can give it
    least: int | None = None  # of a whole number
    read: Callable[[Any], Any] | None = None  # returns a value as a request has it, or refuses it
    is_list: bool = False  # whether a single value of it is a list
    of_one_run: bool = False  # whether what a plan finds is asked for without it
    in_state: bool = False  # whether all that it does is in the state policy, so that it needs exchanges in streams
    applies: Callable[[Schedule], object] = lambda _: True
    own: Callable[[Schedule, int | None], object] = lambda *_: None
    known: Callable[[], Iterable[str]] = tuple
    record: Recorded | None = None
    recorded: bool = True
    kept: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it is off where it is not given."""
        return self.default is False

    @property
    def may_be_file(self) -> bool:
        """Whether its value may be the name of a file."""
        return "FILE" in self.value

    @property
    def default_words(self) -> str:
        """The default in words, where `help` does not have it."""
        return self.usual or (
            "" if isinstance(self.default, bool) else str(self.default) * isinstance(self.default, int)
        )


def disturbance(name: str) -> Recorded:
    """Return the function that finds what disturbs a request's run in one way."""
    return lambda request: request.disorder.recorded(slots=request.in_slots).get(name)


def named_preset(word: str) -> Recorded:
    """Return the function that finds a request's model or cluster: by its name where the package has it."""

    def find(request: Any) -> object:
        given = request.given[word]
        return given if _is_preset(word, given) else getattr(request, word).to_builtins()

    return find


def of_named_model(name: str) -> Recorded:
    """Return the function that finds how a model of the package is trained; another one's record says that itself."""
    return lambda request: request.given[name] if _is_preset("model", request.given["model"]) else None


def _is_preset(word: str, given: object) -> bool:
    return isinstance(given, str) and given in presets.preset_names(f"{word}s")
