"""Tells frontends which engines there are."""
