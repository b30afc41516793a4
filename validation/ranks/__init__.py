"""A process for each device: started here or by torchrun, and ended in any case."""
