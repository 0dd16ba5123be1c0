"""How bytes get from process to process: sockets and their keys, the inherited channel, the shared-memory ring."""
