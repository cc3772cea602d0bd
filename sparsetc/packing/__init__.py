"""The library of formats: packed parts and their registry, words, tiles, and the partition of nonzeros."""
