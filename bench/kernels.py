"""Fast forms against their plain references, side by side in one run.

    python bench/kernels.py [--json]

Chunked Mamba-3 and M2RNN against token-by-token recurrences, fused linear cross entropy against
plain logits; forward and backward, median of alternating rounds.
"""
