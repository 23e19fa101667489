"""KV cache offloading and transfer."""
