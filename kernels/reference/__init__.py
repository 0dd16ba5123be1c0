"""The plain torch reference of every op. A module's `REFERENCES` maps the names of its ops to functions."""
