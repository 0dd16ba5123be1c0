"""The coordinator: a program that tells frontends which engines exist."""
