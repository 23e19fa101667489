"""Loading: how weights get into a model."""
