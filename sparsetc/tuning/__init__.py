"""Plans by measurement: candidates are timed where a user asks for it, and what was measured is kept in a record."""
