"""Comparisons of replays with their simulations."""
