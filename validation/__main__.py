"""`python -m validation`: schedules run for real, compared with the simulation."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    try:
        from cdpsim.cli.console import exit_code_of
    except ImportError as error:
        remedy = "run `pip install -c constraints.txt -e '.[torch,models]'`, or validation/offline.sh"
        print(f"cdpsim: error: {error.name}: cannot be imported ({error}); {remedy}", file=sys.stderr)
        return 2
    return exit_code_of(_serve, arguments)


def _serve(arguments: list[str]) -> int:
    from cdpsim.cli.parser import serve_command
    from cdpsim.errors import RequestError
    from cdpsim.files.notes import explain
    from cdpsim.files.writing import inputs_kept
    from validation.modules import require

    require("torch")
    from validation.calibrate.command import calibrate_command
    from validation.comparison.battery import battery_command
    from validation.comparison.command import replay_command
    from validation.peers.command import peers_command
    from validation.profile.command import profile_command
    from validation.ranks.member import is_out_of_memory
    from validation.replay.contents import ReplayError
    from validation.report.command import report_command

    commands = (replay_command, profile_command, calibrate_command, report_command, battery_command, peers_command)
    try:
        with inputs_kept():
            return serve_command("python -m validation", "validation", commands, arguments)
    except ReplayError as error:
        explain(f"error: {error}")
        return 2
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise RequestError("memory", "there is not enough of it; take a smaller model or batch") from error
        raise


if __name__ == "__main__":
    sys.exit(main())
