"""Training: models cut into stages, their passes, data, optimizers."""
