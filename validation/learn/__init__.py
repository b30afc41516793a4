"""What a schedule's staleness does to learning: networks trained by the lags of its trace."""
