"""The server's base: the application, without any API (see README.md)."""
