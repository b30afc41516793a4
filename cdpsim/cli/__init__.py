"""The command line of cdpsim."""

from collections.abc import Sequence

from cdpsim.cli import help
from cdpsim.cli.commands import breakeven, compare, pictures, presets, runs, superpose, tables
from cdpsim.cli.console import dispatch, parser_of, run
from cdpsim.files.writing import inputs_kept

COMMANDS = (
    *(tables.add_schedules, tables.add_table1, runs.add_simulate, tables.add_pyramid),
    *(compare.add_compare, runs.add_import, breakeven.add_breakeven),
    *(pictures.add_timeline, pictures.add_figure, pictures.add_snapshot, pictures.add_plot),
    superpose.add_superpose,
    *(presets.add_models, presets.add_clusters),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    return run(_serve, arguments)


def _serve(arguments: list[str]) -> int:
    parser, commands = parser_of("cdpsim", help.ABOUT, help.EXAMPLES)
    for add in COMMANDS:
        add(commands)
    with inputs_kept():
        return dispatch(parser, commands, arguments)
