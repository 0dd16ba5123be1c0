"""Executors without a model, and an oracle for step plans."""
