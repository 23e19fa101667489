"""Features of disaggregated serving: encoder, prefill and decode instances."""
