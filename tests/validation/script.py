"""A replay as a program of its own, for tests that start it, with torchrun or without, and end it."""

import sys

from cdpsim.errors import RequestError
from tests.validation.harm import replay_harmed
from tests.validation.known import known
from validation.ranks.torchrun import find_ranks
from validation.replay.case import Case, expected_parameters, largest_difference, prepare
from validation.replay.contents import ReplayError


def main(schedules: str, n: int, harm: str, timeout: float) -> int:
    """Replay schedules one after another, or let rank 1 of the first come to harm."""
    cases = [known(Case(schedule, n)) for schedule in schedules.split(",")]
    reports = True
    try:
        with find_ranks(max(prepare(case).plan.program.devices for case in cases), start=timeout) as ranks:
            reports = ranks.reports
            if harm:
                ranks.call(replay_harmed, cases[0], 1, harm, timeout=timeout)
            for case in cases:
                outcomes = ranks.run(case, timeout=timeout)
                if outcomes is not None:
                    prepared = prepare(case)
                    calls = [outcome.calls for outcome in outcomes]
                    as_planned = calls == [prepared.plan.calls(device) for device in range(len(calls))]
                    print(
                        case.schedule,
                        largest_difference(outcomes, expected_parameters(prepared)) <= 1e-12,
                        as_planned,
                        flush=True,
                    )
        return 0
    except (RequestError, ReplayError) as error:
        if reports:
            print(f"error: {error}\n", end="", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    schedules, n, harm, timeout = sys.argv[1:]
    sys.exit(main(schedules, int(n), harm, float(timeout)))
