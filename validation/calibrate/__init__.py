"""Calibration of a machine: times of messages and stages, and costs fitted to them."""
