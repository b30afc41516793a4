"""`python -m validation` or `cdpsim-validate`: schedules run for real, compared with the simulation."""

import sys
from collections.abc import Sequence

from . import INSTALLED, install_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    try:
        from cdpsim.cli.console import exit_code_of
    except ImportError as error:
        remedy = f"run `{install_command('torch,models')}`{'' if INSTALLED else ', or validation/offline.sh'}"
        print(f"cdpsim: error: {error.name}: cannot be imported ({error}); {remedy}", file=sys.stderr)
        return 2
    return exit_code_of(_serve, arguments)


def _serve(arguments: list[str]) -> int:
    from cdpsim.errors import RequestError
    from cdpsim.files.notes import explain
    from cdpsim.files.writing import inputs_kept

    from .training.modules import require

    require("torch")
    from .calibrate.command import calibrate_command
    from .comparison.battery import battery_command
    from .comparison.command import replay_command
    from .learn.command import learn_command
    from .peers.command import peers_command
    from .profile.command import profile_command
    from .program import serve_harness
    from .ranks.member import is_out_of_memory
    from .replay.contents import ReplayError
    from .report.command import report_command

    commands = (
        *(replay_command, profile_command, calibrate_command, report_command, battery_command, peers_command),
        learn_command,
    )
    try:
        with inputs_kept():
            return serve_harness(commands, arguments)
    except ReplayError as error:
        explain(f"error: {error}")
        return 2
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise RequestError("memory", "there is not enough of it; take a smaller model or batch") from error
        raise


if __name__ == "__main__":
    sys.exit(main())
