"""Studies, which make and measure runs: Table 1, pyramid, comparison, break-even, superposition, Monte-Carlo."""
