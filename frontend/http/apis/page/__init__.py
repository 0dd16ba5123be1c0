"""The page at `/`: a chat and a live view of the engines."""
