"""Learning by the lags of a schedule's trace: the effect of its staleness on accuracy."""
