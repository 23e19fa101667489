"""The features: one folder per area, one module per feature."""
