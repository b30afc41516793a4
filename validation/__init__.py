"""The harness: programs of cdpsim executed with real tensors, and held against the update equation."""
