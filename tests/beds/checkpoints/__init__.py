"""Tiny checkpoints with random weights, big enough that logprobs tell right from wrong."""
