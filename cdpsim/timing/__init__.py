"""The costs of programs, and the times of everything in them."""
