"""The library of formats: packed parts and their registry, the codec of words, tiles, and how nonzeros are dealt."""
