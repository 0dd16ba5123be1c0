"""A session with an engine core: transport, requests in flight, control commands."""
