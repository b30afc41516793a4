"""torch's own runtimes, held against the simulations of their schedules."""
