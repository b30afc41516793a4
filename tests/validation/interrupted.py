"""A battery as a program of its own, for tests that end it: one good trial, and one that never ends."""

import sys

from tests.validation.cases import tiny
from validation.comparison import battery

if __name__ == "__main__":
    these = [tiny("good"), tiny("endless", model="tests.validation.fatal:stopped")]
    vars(battery)["list_trials"] = lambda device: these
    from validation.__main__ import main

    sys.exit(main(["battery", "--device", "cpu", "-o", sys.argv[1]]))
