"""KV offloading."""
