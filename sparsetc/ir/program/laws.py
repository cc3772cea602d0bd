"""Numbers of the cost model that are the same for all devices: what overlaps, waits, or is read in so many bytes.

In: measurements, which each number names. Out: constants, which `cost` reads; what differs between devices stands in
their profiles.
"""

from __future__ import annotations

from sparsetc.ir.program.count import FIBERS, ITEMS

OVERLAP = 3
"""Exponent of the norm that adds resources' times: 1 would be one after another, infinity perfect overlap."""
TURN_POWER = 0.6
"""Power of its share of a whole tile that a turn over a smaller one takes (H200, TTMc of rank 32 x 32 and matrices in
tiles of 16 x 16; `benchmarks/results/ttmc_tiles.json`, `choices.json`)."""
WAITS_A_TURN, FIRST_WAITS = 0.55, 4.0
"""Rounds of loads that a turn over a tile waits for, while those of later turns are under way, and that the first turns
wait for beside (H200, SpMM by windows, of 8 tiles an item to 344: `benchmarks/results/windows.json`, `spmm.json`)."""
LISTED_TURN = 0.4
"""What part of a turn over a tile one over a window takes in bfloat16, whose side is loaded for the dot at once (H200,
SpMM at `"medium"`, 16 matrices at 32 to 512 columns: `benchmarks/results/spmm.json`, as what follows)."""
TALL, TALL_WAITS = 4096, 3.0
"""Positions of windows from which those of 16 bits wait for so many rounds of loads more, before the first dot."""
ADDED_FROM_TILES = 3
"""How many times as long as the profile's single rows those take that programs of tiles add, many at once (ditto)."""
CONVERSION = 16
"""Multiplications that take as long as bringing an element of a dot's side to 16 bits, out of shared memory and back
(H200, SpMM by windows of operands that were rounded before, or were not: 3e12 elements a second)."""
UNCROWDED, CROWDING = 16384, 0.35
"""Rows, copies included, from which additions in no order do not wait for one another, and the power of what they lack
by which additions to fewer rows take longer (H200, leaves of MM-CSF at rank 32, copies of which 4, 16 and 64 were
added to: 91 rows 293 to 103 us, 686 rows 353 to 116, 875 rows 590 to 362, 18,154 rows 744 to 670;
`benchmarks/results/one_copy.json`)."""
WARP = 32
"""Threads of a warp."""
LANE_WAIT, STORED_RATE = 0.31, 0.68
"""Share of the profile's `fiber` that a lane which stores a row of its own takes for each thread, up to all of it; and
share of the rate at which memory is read at which such lanes store, neighbours in time not lying side by side (H200,
TTV and TTM of rank 16 and 64 of 35 M nonzeros to 22 M rows, within 5 %: `benchmarks/results/rows_stored.json`)."""
LINE, NEAR_WAIT = 128, 0.35
"""Bytes of a cache line; and share of the profile's `wait` that a round of loads over fibers takes where a line of
words serves many rounds and there is little else to load (H200, SpMM by rows of 13 matrices: rounds of 128 bytes of
words at 32 columns took 0.8 to 1.2 us, of 16 bytes 0.33 to 0.4 at 128, 0.8 at 4096; `benchmarks/results/spmm.json`)."""
ROOMY, ROOMY_WAITS = 64, (0.09, 0.78, 0.35)
"""Registers of a thread from which a round's loads are under way together; and the share of the profile's `wait` that a
round then takes where a line of words serves many, where it serves one, and where there is as much else to load as
rounds take (H200, as before: 0.17 us at 128 columns, 0.78 at 32)."""
FAR_WAIT, FAR_BUSY_WAIT = 1.5, 3.0
"""How many of the profile's `wait` a round over fibers takes whose gathered rows lie in device memory, where there is
little else to load, and where there is as much as rounds take (H200, MTTKRP in mode 1 of a tensor like delicious by
rows that are not cut: 1,112 rounds, 4.2 ms; `benchmarks/results/deterministic.json`)."""
LISTED_ROW, LISTED_BYTE = 80, 3.4
"""Bytes that are zeroed in one piece in the time that a row, and each byte of it, takes which is zeroed by its number
(H200: rows of 4 to 16,384 bytes, a tenth and two fifths of them, 0.2 to 1.4 TB/s where all of them went at 4.65)."""
SPLIT = 2
"""Multiplications that take as long as making halves of an element of a dot's side (H200, SpMM by windows of 16 to 128
rows, 7 matrices: 106 cases, of which the model is 14 % off; `benchmarks/results/windows_halves.json`)."""
LARGE_TURN, LARGE_SHARE = 1 << 19, 1.25
"""Flops of a turn's dots from which they run at so many times the share of the peak that those of smaller turns do
(H200, SpMM by windows of 64 rows in tf32x3: c2000_5 at 4,096 columns, 527 us, 872 by windows of 16)."""
SECTOR = 32
"""Bytes that reach registers of a gathered row at least."""
WORD = 4
"""Bytes of an element of an index array, of most kinds, and of a row's scale."""
SHORT = 2
"""Bytes of a fiber's length where kernels alone read it, and fibers are cut before 2**15 nonzeros."""
TILE_WORD = 4
"""Bytes that say where a tile lies: the coordinates of each, however many words they take, or its number in a list of
pairs. What an item's words take was not counted when rates of tiles were measured."""
STRUCTURE = {
    "pair_ptr": 8 * ITEMS,
    "item_x": WORD * ITEMS,
    "item_y": WORD * ITEMS,
    "lane_len": WORD * FIBERS,
    "value_ptr": WORD * FIBERS,
}
"""Bytes of the arrays that hold no coordinates. Of those not here little is read, once an item or a block: such was the
program whose rates were measured."""
VECTOR = 4
"""Elements a thread loads at once of a gathered row."""
