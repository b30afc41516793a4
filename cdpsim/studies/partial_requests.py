"""Requests of several schedules with the same options, each with those that its schedule takes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from cdpsim.errors import RequestError
from cdpsim.request import Request
from cdpsim.request.options import InapplicableOption
from cdpsim.request.sharing import is_given
from cdpsim.schedules import Schedule

Outcome = TypeVar("Outcome")


class PartialRequests:
    """Requests of several schedules, each with those of the options only that its schedule takes."""

    def __init__(self) -> None:
        self._schedules: dict[str, Schedule] = {}
        self._taken: set[tuple[str, str]] = set()  # options, each with a schedule that takes it in one of the requests
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
                name = request.schedule.name
                self._schedules[name] = request.schedule
                given = {option.replace("_", "-") for option, value in options.items() if is_given(value)}
                self._taken |= {(option, name) for option in given & {*request.schedule.options}}
                for option, refusal in dropped.items():
                    self._untaken.setdefault(option, {})[name] = refusal
                return outcome, options

    def untaken(self) -> dict[str, list[str]]:
        """Return by option which schedules ran without it in all requests; refuse an option that no schedule takes.

        The refusal is one of a schedule that takes it in other requests, if there is any.
        """
        untaken = {
            option: [name for name in refusals if (option, name) not in self._taken]
            for option, refusals in self._untaken.items()
        }
        for option, names in untaken.items():
            if len(names) == len(self._schedules):
                raise self._untaken[option][min(names, key=lambda name: option not in self._schedules[name].options)]
        return {option: names for option, names in untaken.items() if names}
