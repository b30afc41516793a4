"""Runtimes that others wrote, held against the simulation of what they do."""
