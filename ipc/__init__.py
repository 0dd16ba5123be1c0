"""What crosses a process boundary: messages, codec, sockets, handshake, failures. See README.md."""
