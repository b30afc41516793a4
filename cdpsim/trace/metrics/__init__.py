"""Metrics of a run: pure functions of a program and its times."""
