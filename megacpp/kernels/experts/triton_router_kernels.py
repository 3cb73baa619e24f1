"""Triton kernels of a router, launched by triton_router.py, whose docstring says what they do.

Rows are tokens; K experts of each of E. KB and BLOCK are the powers of two that hold them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softmax(x, inside):
    """Return the softmax of each row, its largest number and the sum of exponentials."""
    largest = tl.max(tl.where(inside, x, float("-inf")), 1)
    power = tl.where(inside, tl.exp(x - largest[:, None]), 0.0)
    total = tl.sum(power, 1)
    return power / total[:, None], largest, total


@triton.jit
def _put_best(values, inside, row, rows, column, out, K: tl.constexpr, BLOCK: tl.constexpr):
    """Store the columns of the K largest values of each row, the largest first."""
    values = tl.where(values == values, values, float("inf"))
    left = inside
    for k in range(K):
        best = tl.max(tl.where(left, values, float("-inf")), 1)
        place = tl.min(tl.where(left & (values == best[:, None]), column[None, :], BLOCK), 1)
        tl.store(out + row * K + k, place.to(tl.int64), mask=row < rows)
        left = left & (column[None, :] != place[:, None])


@triton.jit
def choose_kernel(
    logits, bias, chosen, plain, zeros, rows,
    K: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, PLAIN: tl.constexpr,
    ZEROS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the chosen experts and the most probable ones.

    Args:
        logits: `[rows, E]`
        bias: `[E]`, added to scores.
        chosen: `[rows, K]`, experts.
        plain: `[rows, K]`, stored likewise, without the bias.
        zeros: `[rows, E]`, set to zeros.
        rows: tokens.
        K: experts of a token.
        SIGMOID: scores are sigmoids.
        BIASED: there is a bias.
        PLAIN: store `plain`.
        ZEROS: set `zeros`.
        E: experts.
        ROWS: tokens at a time.
        BLOCK: power of two that holds E.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row >= 0)[:, None] & (column < E)[None, :]
    read = inside & (row < rows)[:, None]
    x = tl.load(logits + row[:, None] * E + column[None, :], mask=read, other=0.0)
    if SIGMOID:
        score = tl.where(inside, _sigmoid(x), 0.0)
    else:
        score = _softmax(x, inside)[0]
    best = score
    if BIASED:
        best = score + tl.load(bias + column, mask=column < E, other=0.0)[None, :]
    _put_best(best, inside, row, rows, column, chosen, K, BLOCK)
    if ZEROS:
        tl.store(zeros + row[:, None] * E + column[None, :], tl.zeros_like(x), mask=read)
    if PLAIN:
        if SIGMOID:
            score = score / (tl.sum(score, 1) + 1e-20)[:, None]
        _put_best(score, inside, row, rows, column, plain, K, BLOCK)


@triton.jit
def count_kernel(
    chosen, plain, document, totals, counts, copies,
    K: tl.constexpr, TOTALS: tl.constexpr, COUNTS: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add choices of each expert to the totals, and others to those of each token's document.

    Args:
        chosen: `[rows, K]`, experts.
        plain: `[rows, K]`, the others.
        document: `[rows]`, row of `counts` of each token.
        totals: `[E]`
        counts: `[documents, E]`
        copies: choices in all.
        K: experts of a token.
        TOTALS: add to `totals`.
        COUNTS: add to `counts`.
        E: experts.
        ROWS: choices of a program.
        BLOCK: power of two that holds E.
    """
    copy = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = copy < copies
    if TOTALS:
        column = tl.arange(0, BLOCK)
        expert = tl.load(chosen + copy, mask=inside, other=E)
        found = tl.sum((expert[:, None] == column[None, :]).to(tl.int32), 0)
        tl.atomic_add(totals + column, found.to(tl.int64), mask=(column < E) & (found > 0))
    if COUNTS:
        expert = tl.load(plain + copy, mask=inside, other=0)
        row = tl.load(document + copy // K, mask=inside, other=0)
        tl.atomic_add(counts + row * E + expert, tl.full([ROWS], 1.0, tl.float32), mask=inside)


@triton.jit
def _document_loads(
    loads, document, length, row, inside, read, column, E: tl.constexpr, INDIRECT: tl.constexpr
):
    """Return the loads of the document of each token."""
    if INDIRECT:
        place = tl.load(document + row, mask=inside, other=0)
        found = tl.load(loads + place[:, None] * E + column[None, :], mask=read, other=0.0)
        return found / tl.load(length + row, mask=inside, other=1).to(tl.float32)[:, None]
    return tl.load(loads + row[:, None] * E + column[None, :], mask=read, other=0.0)


@triton.jit
def weights_kernel(
    logits, chosen, weights, load, loads, document, length, parts, rows, programs, scale, of_batch,
    of_documents, of_z,
    K: tl.constexpr, KB: tl.constexpr, SIGMOID: tl.constexpr, PRE: tl.constexpr,
    LOSSES: tl.constexpr, BATCH: tl.constexpr, DOCUMENTS: tl.constexpr, INDIRECT: tl.constexpr,
    Z: tl.constexpr, SUMMED: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store weights of the chosen experts, and of each program the sums of the losses.

    Args:
        logits: `[rows, E]`
        chosen: `[rows, K]`, experts.
        weights: `[rows, K]`
        load: `[E]`, loads of the batch.
        loads: `[X, E]`, loads of documents.
        document: `[rows]`, row of `loads` of each token.
        length: `[rows]`, by which these are divided.
        parts: `[programs, numbers]`
        rows: tokens.
        programs: how many there are.
        scale: factor on the weights.
        of_batch: factor of the loss of the batch.
        of_documents: factor of the loss of documents.
        of_z: factor of the z-loss.
        K: experts of a token.
        KB: power of two that holds K.
        SIGMOID: scores are sigmoids.
        PRE: weights are parts of the softmax over all.
        LOSSES: there are losses.
        BATCH: there is that of the batch.
        DOCUMENTS: there is that of documents.
        INDIRECT: `document` and `length` are read.
        Z: there is a z-loss.
        SUMMED: store `parts`.
        E: experts.
        ROWS: tokens at a time.
        BLOCK: power of two that holds E.
    """
    program = tl.program_id(0)
    column, k = tl.arange(0, BLOCK), tl.arange(0, KB)
    batch, documents = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), programs):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        mine = inside[:, None] & (k < K)[None, :]
        place = tl.load(chosen + row[:, None] * K + k[None, :], mask=mine, other=0)
        x_k = tl.load(logits + row[:, None] * E + place, mask=mine, other=0.0)
        real = (row >= 0)[:, None] & (column < E)[None, :]
        read = real & inside[:, None]
        x = tl.zeros([ROWS, BLOCK], tl.float32)
        if PRE or SUMMED:
            x = tl.load(logits + row[:, None] * E + column[None, :], mask=read, other=0.0)
        if SIGMOID:
            part = tl.where((row >= 0)[:, None] & (k < K)[None, :], _sigmoid(x_k), 0.0)
            share = part / (tl.sum(part, 1) + 1e-20)[:, None]
        else:
            if PRE:
                _, largest, total = _softmax(x, real)
                share = tl.exp(x_k - largest[:, None]) / total[:, None]
            else:
                share, _, _ = _softmax(x_k, (row >= 0)[:, None] & (k < K)[None, :])
        tl.store(weights + row[:, None] * K + k[None, :], share * scale, mask=mine)
        if SUMMED:
            p, largest, total = _softmax(x, real)
            if Z:
                log = largest + tl.log(total)
                z += tl.where(inside, log * log, 0.0)
            if SIGMOID:
                p = tl.where(real, _sigmoid(x), 0.0)
                p = p / (tl.sum(p, 1) + 1e-20)[:, None]
            if BATCH:
                of = tl.load(load + column, mask=column < E, other=0.0)
                batch += tl.where(inside, tl.sum(p * of[None, :], 1), 0.0)
            if DOCUMENTS:
                found = _document_loads(
                    loads, document, length, row, inside, read, column, E, INDIRECT
                )
                documents += tl.where(inside, tl.sum(p * found, 1), 0.0)
    if SUMMED:
        tl.store(parts + program * 3, tl.sum(batch, 0) * of_batch)
        tl.store(parts + program * 3 + 1, tl.sum(documents, 0) * of_documents)
        tl.store(parts + program * 3 + 2, tl.sum(z, 0) * of_z)


@triton.jit
def gradient_kernel(
    logits, chosen, grad, loss_scale, load, loads, document, length, out, parts, rows, programs,
    scale, of_batch, of_documents, of_z,
    K: tl.constexpr, KB: tl.constexpr, SIGMOID: tl.constexpr, PRE: tl.constexpr,
    LOSSES: tl.constexpr, BATCH: tl.constexpr, DOCUMENTS: tl.constexpr, INDIRECT: tl.constexpr,
    Z: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the logits, and of each program the squared norms of its two parts.

    Args: as `weights_kernel`, and
        grad: `[rows, K]`, gradient of the weights.
        loss_scale: 0-d, gradient of the losses.
        out: `[rows, E]`
    """
    program = tl.program_id(0)
    column, k = tl.arange(0, BLOCK), tl.arange(0, KB)
    of_main, of_losses = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), programs):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        mine = inside[:, None] & (k < K)[None, :]
        real = (row >= 0)[:, None] & (column < E)[None, :]
        read = real & inside[:, None]
        place = tl.load(chosen + row[:, None] * K + k[None, :], mask=mine, other=0)
        x_k = tl.load(logits + row[:, None] * E + place, mask=mine, other=0.0)
        x = tl.load(logits + row[:, None] * E + column[None, :], mask=read, other=0.0)
        d_k = tl.load(grad + row[:, None] * K + k[None, :], mask=mine, other=0.0) * scale
        every, largest, total = _softmax(x, real)
        if SIGMOID:
            part = tl.where((row >= 0)[:, None] & (k < K)[None, :], _sigmoid(x_k), 0.0)
            share = part / (tl.sum(part, 1) + 1e-20)[:, None]
        else:
            if PRE:
                share = tl.exp(x_k - largest[:, None]) / total[:, None]
            else:
                share, _, _ = _softmax(x_k, (row >= 0)[:, None] & (k < K)[None, :])
        mean = tl.sum(d_k * share, 1)
        if PRE:
            d_k = d_k * share
        else:
            d_k = share * (d_k - mean[:, None])
        if SIGMOID:
            d_k = d_k * (1.0 - part)
        main = tl.zeros([ROWS, BLOCK], tl.float32)
        if PRE:
            main = -every * mean[:, None]
        for i in range(K):
            at = tl.load(chosen + row * K + i, mask=inside, other=0)
            of = tl.sum(tl.where((k == i)[None, :], d_k, 0.0), 1)
            main += tl.where(column[None, :] == at[:, None], of[:, None], 0.0)
        if LOSSES:
            of_main += tl.sum(tl.where(read, main * main, 0.0), 1)
            by = tl.load(loss_scale).to(tl.float32)
            p, slope = every, tl.full([ROWS, BLOCK], 1.0, tl.float32)
            if SIGMOID:
                p = tl.where(real, _sigmoid(x), 0.0)
                slope = 1.0 - p
                p = p / (tl.sum(p, 1) + 1e-20)[:, None]
            d = tl.zeros([ROWS, BLOCK], tl.float32)
            if BATCH:
                d += tl.load(load + column, mask=column < E, other=0.0)[None, :] * of_batch
            if DOCUMENTS:
                found = _document_loads(
                    loads, document, length, row, inside, read, column, E, INDIRECT
                )
                d += found * of_documents
            own = p * (d - tl.sum(d * p, 1)[:, None]) * slope
            if Z:
                own += every * (2.0 * of_z * (largest + tl.log(total)))[:, None]
            own = own * by
            of_losses += tl.sum(tl.where(read, own * own, 0.0), 1)
            main += own
        tl.store(out + row[:, None] * E + column[None, :], main, mask=read)
    if LOSSES:
        tl.store(parts + program * 2, tl.sum(of_main, 0))
        tl.store(parts + program * 2 + 1, tl.sum(of_losses, 0))


@triton.jit
def add_up_kernel(parts, sums, rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """Add the sum of each column to a number.

    Args:
        parts: `[programs, numbers]`
        sums: `[numbers]`
        rows: of `parts`.
        C: columns.
        BLOCK: power of two that holds the rows.
    """
    row = tl.arange(0, BLOCK)
    for i in range(C):
        part = tl.load(parts + row * C + i, mask=row < rows, other=0.0)
        tl.store(sums + i, tl.load(sums + i) + tl.sum(part, 0))
