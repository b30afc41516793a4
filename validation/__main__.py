"""`python -m validation`: schedules run for real, held against the simulation."""

import sys
from collections.abc import Sequence

from cdpsim.console import dispatch, parser_of, run

ABOUT = """Hold the simulator against reality: replay its programs with real tensors, profile
real models for it, measure this machine for it, and show how far it was off.
"""
EXAMPLES = """examples:
  python -m validation replay multi-cdp -n 4 -o report.json    run it, compare with the simulation
  python -m validation profile gpt2 -n 4 -o gpt2.toml          a model file for cdpsim's --model
  python -m validation calibrate -o box.toml                   a cluster file for cdpsim's --cluster
  python -m validation report results                          all reports as one table
  python -m validation battery -o battery.json                 everything that this machine can show

`python -m validation COMMAND --help` explains a command. Exit codes: 0 done, 1 not
within tolerance, 2 the request cannot be served (one line on stderr says why, and the
remedy), 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    return run(_serve, arguments)


def _serve(arguments: list[str]) -> int:
    from validation import battery, calibrate, profile, report, request

    parser, commands = parser_of("python -m validation", ABOUT, EXAMPLES)
    for command in (request, profile, calibrate, report, battery):
        command.add_parser(commands)
    return dispatch(parser, commands, arguments)


if __name__ == "__main__":
    sys.exit(main())
