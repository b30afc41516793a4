"""The version of the package, in a module that imports nothing."""

__version__ = "0.1.0"
RESULTS = 3  # changes whenever the same request may get other metrics; names of points in sweeps have it
