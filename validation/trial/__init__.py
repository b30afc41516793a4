"""Replays held against their simulations."""
