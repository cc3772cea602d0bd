"""Level 3: what one work item does, its text, its checks, its cost, and what runs it alone."""
