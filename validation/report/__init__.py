"""Results of replays: the schema of a report, and tables and figures of many."""
