"""The traffic of benchmarks: requests, their times, and the client that sends them."""
