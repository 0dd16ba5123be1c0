"""The helper program, which reads and follows forms outside the engine."""
