"""Cache keys of vLLM."""
