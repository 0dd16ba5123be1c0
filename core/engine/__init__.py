"""The running engine: busy loop, admission, control commands, step outputs, and the ports that clients connect to."""
