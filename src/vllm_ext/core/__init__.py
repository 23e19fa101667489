"""The only code that knows how to patch vLLM. It imports no feature by name."""
