"""Programs of cdpsim played with real tensors: one interpreter, which knows no schedule."""
