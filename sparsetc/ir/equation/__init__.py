"""Level 1: what is computed."""
