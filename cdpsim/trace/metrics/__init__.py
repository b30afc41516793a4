"""What a run shows: pure functions of a program and its times."""
