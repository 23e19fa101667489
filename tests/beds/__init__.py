"""Test beds: the vLLM releases side by side, and what the tests run on them."""
