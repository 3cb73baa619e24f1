"""Numbers of rows that expert kernels work on at once; no torch import here."""

# A CPU matrix product may round a row differently when the number of rows changes (another kernel,
# another split of the sum) or when the row falls into a remainder of the tiles. Products of 48 rows
# each, which tiles of 2, 3, 4, 6, 8, 12, 16, 24 and 48 rows divide, don't, as long as rows are a
# multiple of 16 bytes (MKL on AMD rounds odd widths in fp64 by place): tests/model/test_moe.py.
CPU_ROWS = 48
# torch.nn.functional.grouped_mm sums over a group in units of 16 bytes: 8 rows of bf16.
GPU_ROWS = 16
# Elements between products are worked on in blocks of rows: at most so many, none smaller than so
# many elements (which a core's cache holds), so that wide temporary tensors stay small.
BLOCKS, BLOCK_ELEMENTS = 16, 2**16


def block_rows(slots: int, width: int) -> int:
    """Return rows of one block of hidden units.

    Args:
        slots: rows in all.
        width: hidden units of an expert.
    """
    each = max(-(-slots // BLOCKS), BLOCK_ELEMENTS // max(1, width), 1)
    return -(-each // CPU_ROWS) * CPU_ROWS


def most_slots(num_experts: int, copies: int, multiple: int) -> int:
    """Slots of groups that are padded to a multiple, whatever experts the copies have."""
    return (copies + min(num_experts, copies) * (multiple - 1)) // multiple * multiple
