"""What each of our programs does as a process: its start and end, its log, its pauses."""
