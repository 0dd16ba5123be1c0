"""Common to all of Headrace's programs: their start and end, log, and pauses by garbage collection."""
