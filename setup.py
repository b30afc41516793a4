"""The packages of a wheel: `cdpsim`, and the folder `validation` as `cdpsim_validation`."""

from setuptools import find_packages, setup

harness = [name.replace("validation", "cdpsim_validation", 1) for name in find_packages(include=["validation*"])]
setup(packages=[*find_packages(include=["cdpsim*"]), *harness], package_dir={"cdpsim_validation": "validation"})
