"""Serving: HTTP answers of the API server."""
