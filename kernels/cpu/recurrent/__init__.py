"""Layers that keep a state per sequence."""
