"""Checkpoints with seeded weights that vLLM and transformers both load."""
