"""Replay of cdpsim's programs with real tensors, by one interpreter that knows no schedule."""
