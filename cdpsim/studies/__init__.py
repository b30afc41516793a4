"""What runs are made for: Table 1, the pyramid, comparisons, break-even, superposition, many runs."""
