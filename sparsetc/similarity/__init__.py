"""1-SA: groups of rows with similar columns, and the density of the blocks that they form."""
