"""`python -m cdpsim`: the command line."""

import sys

from cdpsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
