"""Sparse tensors: a pattern with values, how they come from elsewhere, and keys of coordinates."""
