"""The command line of cdpsim."""

from collections.abc import Sequence

from cdpsim.cli.console import exit_code_of
from cdpsim.cli.parser import completion_command, help_text, serve_command
from cdpsim.cli.picture_commands import figure_command, plot_command, snapshot_command, timeline_command
from cdpsim.cli.run_commands import import_command, simulate_command
from cdpsim.cli.study_commands import breakeven_command, compare_command, plan_command, sweep_command
from cdpsim.cli.table_commands import (
    clusters_command,
    mesh_command,
    models_command,
    published_command,
    pyramid_command,
    rounds_command,
    schedules_command,
    superpose_command,
    table1_command,
)
from cdpsim.files.writing import inputs_kept

COMMANDS = (
    *(schedules_command, models_command, clusters_command),
    *(
        simulate_command,
        compare_command,
        plan_command,
        sweep_command,
        breakeven_command,
        mesh_command,
        pyramid_command,
        rounds_command,
        import_command,
    ),
    *(timeline_command, plot_command, snapshot_command),
    *(published_command, table1_command, figure_command, superpose_command),
    completion_command,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    return exit_code_of(_serve, arguments)


def _serve(arguments: list[str]) -> int:
    with inputs_kept():
        return serve_command("cdpsim", help_text, COMMANDS, arguments)
