"""What stages hold and do, found with fake tensors: storages, operations, and where to cut."""
