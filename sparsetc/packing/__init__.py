"""What formats are made of: packed parts and their registry, the codec of words, tiles, and how nonzeros are dealt."""
