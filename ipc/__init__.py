"""Everything that crosses a process boundary: messages, codec, sockets, handshake, failures. See README.md."""
