"""The modules that the harness needs: imported when needed, and refused in one line where they do not fit."""

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any

from cdpsim.errors import RequestError

from .. import install_command

# The first versions that fit, as the extras in pyproject.toml have them. Before 5.9, transformers builds a ViT of other
# parts; before 5.3 a GPT-2 and its masks; before 5.0 a Llama, Mistral and Qwen2.
FIRST = {"torch": "2.6", "transformers": "5.9"}
_EXTRAS = {"torch": "torch", "transformers": "models"}


class Unfit(RequestError):
    """A module that is missing, broken or too old."""


def require(name: str) -> Any:
    """Import a module and return it; refuse one that is missing, broken or too old, with the version that fits."""
    try:
        module = import_module(name)
    except Exception as error:  # a module that was built for another one fails in any way
        raise describe_unfit(name, error) from error
    if _version_numbers(module.__version__) < _version_numbers(FIRST[name]):
        raise Unfit(name, f"{module.__version__} does not fit; {_remedy(name)}")
    return module


def describe_unfit(name: str, error: BaseException) -> Unfit:
    """Return why a module, or a part of it, cannot be imported: the module at fault, and the version that fits."""
    while error.__cause__:
        error = error.__cause__
    lacks = error.name if isinstance(error, ModuleNotFoundError) else None
    if lacks == name:
        return Unfit(name, f"is not installed; {_remedy(name)}")
    if lacks:
        return Unfit(name, f"{installed(name)} needs {lacks}, which is not installed; install it")
    reason, culprit = reason_of(error), _raiser(error)
    if culprit == name or not installed(culprit):
        return Unfit(name, f"{installed(name)} does not work here ({reason}); {_remedy(name)}")
    problem = f"{installed(culprit)} does not work here ({reason}), and {name} {installed(name)} imports it"
    return Unfit(culprit, f"{problem}; install one that fits the other modules, or remove it")


def reason_of(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def installed(name: str) -> str | None:
    """Return the version of an installed module, without importing it."""
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


def _raiser(error: BaseException) -> str:
    """Return the package whose code has raised an error."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] if trace else ""


def _remedy(name: str) -> str:
    return f"{FIRST[name]} or newer fits: run `{install_command(_EXTRAS[name])}`"


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, for comparisons: (5, 10) of 5.10.0.dev0."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
