"""The orders of pipelines, by the papers: the actions of each device in a step."""
