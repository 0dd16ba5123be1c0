"""Health, metrics, load, and the document of the API."""
