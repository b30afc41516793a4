"""What came of replays: the form of a report, and tables and figures of many."""
