"""Simulated fleets of up to thousands of engines on virtual time: real routers and clients, simulated engines."""
