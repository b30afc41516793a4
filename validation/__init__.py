"""The torch harness: `validation` in a checkout, `cdpsim_validation` where the project is installed."""

INSTALLED = __name__ == "cdpsim_validation"
PROGRAM = "cdpsim-validate" if INSTALLED else "python -m validation"  # in help and refusals


def install_command(extras: str) -> str:
    """Return the command that installs extras of the project."""
    return f"pip install 'cdpsim[{extras}]'" if INSTALLED else f"pip install -c constraints.txt -e '.[{extras}]'"
