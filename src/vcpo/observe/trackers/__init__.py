"""Experiment trackers: the same metrics for W&B, trackio, MLflow or a user's own, each in a process of its own."""
