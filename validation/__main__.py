"""`python -m validation`: schedules run for real, held against the simulation."""

import sys
from collections.abc import Sequence

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
remedy), 130 interrupted, 143 terminated.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    try:
        from cdpsim.cli.console import run
    except ImportError as error:
        remedy = "run `pip install -c constraints.txt -e '.[torch,models]'`, or validation/offline.sh"
        print(f"cdpsim: error: {error.name}: cannot be imported ({error}); {remedy}", file=sys.stderr)
        return 2
    return run(_serve, arguments)


def _serve(arguments: list[str]) -> int:
    from cdpsim.cli.console import dispatch, parser_of, say
    from cdpsim.errors import RequestError
    from cdpsim.files.writing import inputs_kept
    from validation.modules import needed

    needed("torch")
    from validation.calibrate import command as calibrate
    from validation.profile import command as profile
    from validation.ranks.member import is_out_of_memory
    from validation.replay.plan import ReplayError
    from validation.report import command as report
    from validation.trial import battery
    from validation.trial import command as request

    parser, commands = parser_of("python -m validation", ABOUT, EXAMPLES)
    for command in (request, profile, calibrate, report, battery):
        command.add_parser(commands)
    try:
        with inputs_kept():
            return dispatch(parser, commands, arguments)
    except ReplayError as error:
        say(f"error: {error}")
        return 2
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise RequestError("memory", "there is not enough of it; take a smaller model or batch") from error
        raise


if __name__ == "__main__":
    sys.exit(main())
