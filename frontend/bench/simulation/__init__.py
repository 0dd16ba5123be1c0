"""Fleets of thousands of engines on virtual time: real routers and clients, engines that fail."""
