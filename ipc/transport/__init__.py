"""Transport of bytes between processes: sockets and their keys, the inherited channel, the shared-memory ring."""
