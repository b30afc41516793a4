"""What is trained: models cut into stages, their passes, data, optimizers."""
