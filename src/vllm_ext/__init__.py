"""vllm-ext: fixes and features for the vLLM release its user has pinned."""

__version__ = "0.1.0"
