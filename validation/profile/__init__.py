"""Profiles of stages, made with fake tensors: storages, operations, and the cuts between stages."""
