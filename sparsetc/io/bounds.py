"""Limits on the cost of reading a file, far above the needs of real files."""

LINE = 64 * 1024
"""Bytes of a line of text, its comment included, up to which it is read. The longest line of numbers, 64 coordinates of
int64 and two exact decimals, has less than 6 KB; the rest is for comments."""
ORDER = 64
"""Modes of a tensor in a file: numpy has no more, and the letters of an equation are 52."""
SLACK = 16 * 2**20
"""Bytes of text that may hold no number: comments, blanks, and digits beyond `PER_NUMBER`."""
GROUPS = 1024
"""Row groups of a Parquet file that may be of any size; each takes a third of a millisecond."""
PER_GROUP = 256
"""Rows that a row group must have on average, beyond `GROUPS`. Files in use have 1,000 to 1,000,000."""
PER_NUMBER = 256
"""Bytes of text a number may take on average, beyond `SLACK`. Files in use have 2 to 25."""
