"""Traces of requests, exported by OpenTelemetry."""
