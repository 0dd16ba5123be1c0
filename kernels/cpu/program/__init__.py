"""Lists of ops that one call runs."""
