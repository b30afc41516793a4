"""Plans: which schedule is best for a model, a cluster, a memory and a batch, and what proves it."""
