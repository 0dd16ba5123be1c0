"""What a benchmark sends, to whom and when."""
