"""Observability: what the plugin did, seen from outside."""
