"""What the plugin costs; each module prints figures measured side by side in one run."""
