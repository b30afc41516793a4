"""Requests of several schedules with the same options, each with those that its schedule takes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from cdpsim.errors import RequestError
from cdpsim.request import Request
from cdpsim.request.options import InapplicableOption

Outcome = TypeVar("Outcome")


class PartialRequests:
    """Requests of several schedules, each with those of the options only that its schedule takes."""

    def __init__(self) -> None:
        self._schedules: set[str] = set()
        self._untaken: dict[str, dict[str, RequestError]] = {}  # by option and schedule

    def serve(
        self,
        options: Mapping[str, Any],
        action: Callable[[Request], Outcome],
        *,
        needed: Collection[str] = (),
        silent: Collection[str] = (),
    ) -> Outcome:
        """Return the outcome of an action on the request of those options that its schedule takes, as `serve_part`."""
        return self.serve_part(options, action, needed=needed, silent=silent)[0]

    def serve_part(
        self,
        options: Mapping[str, Any],
        action: Callable[[Request], Outcome],
        *,
        needed: Collection[str] = (),
        silent: Collection[str] = (),
    ) -> tuple[Outcome, dict[str, Any]]:
        """Return the outcome of an action on the request of those options that its schedule takes, and these options.

        A schedule that does not take a `needed` option is refused. A dropped option that is `silent`, because it is a
        default of the command, is not reported.
        """
        options, dropped = dict(options), {}
        while True:
            try:
                outcome = action(request := Request.from_builtins(options))
            except InapplicableOption as error:
                option = error.subject.replace("-", "_")
                if error.subject in needed or option not in options:
                    raise
                del options[option]
                if option not in silent:
                    dropped[error.subject] = error
            else:
                self._schedules.add(request.schedule.name)
                for option, refusal in dropped.items():
                    self._untaken.setdefault(option, {})[request.schedule.name] = refusal
                return outcome, options

    def untaken(self) -> dict[str, list[str]]:
        """Return by option which schedules ran without it; refuse an option that no schedule takes."""
        for refusals in self._untaken.values():
            if len(refusals) == len(self._schedules):
                raise next(iter(refusals.values()))
        return {option: list(refusals) for option, refusals in self._untaken.items()}
