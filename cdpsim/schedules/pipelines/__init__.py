"""Pipelines' orders, by the papers."""
