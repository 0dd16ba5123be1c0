"""Makes several engine-cores usable as one: routing and migration of requests."""
