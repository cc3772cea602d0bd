"""Level 3, the tile program of one work item: its statements, names, text, checks and cost."""
