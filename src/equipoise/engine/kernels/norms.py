"""GPU kernels for what lies between the convolutions of a ResNet-18: batch norms, ReLUs, shortcuts and pooling.

Convolutions of 64 channels and more are cuDNN's; everything else is bound by memory, and here it is done in as few
passes as there can be. Activations are rows of channels, one row a pixel: torch's channels-last. `sums` of a batch norm
is (2, WIDEST): Σy and Σy² of its input y forward, Σg and Σgy of the gradient g at its output backward, in whole numbers
of 1/FORWARD or 1/BACKWARD, as in `triton.py`. A program has BM rows of BC channels at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDEST = tl.constexpr(512)
"""most channels there are: the sums of every batch norm have as many places"""
FORWARD = tl.constexpr(2.0**24)
"""what sums of activations are counted in; they may reach 2^39"""
BACKWARD = tl.constexpr(2.0**40)
"""what sums of gradients are counted in; they may reach 2^23"""
EPS = tl.constexpr(1e-5)
"""of batch norms, as torch has it"""


@triton.jit
def total(sums, which: tl.constexpr, c, unit: tl.constexpr):
    """One of the two sums, for channels c."""
    return tl.load(sums + which * WIDEST + c).to(tl.float32) / unit


@triton.jit
def moments(sums, c, count):
    """Mean and 1/σ of a batch norm's input, for channels c."""
    mean = total(sums, 0, c, FORWARD) / count
    square = total(sums, 1, c, FORWARD) / count
    var = tl.where(square < 0, float("nan"), tl.maximum(square - mean * mean, 0.0))  # the sum has gone out of range
    return mean, 1.0 / tl.sqrt(var + EPS)


@triton.jit
def affine(sums, gamma, beta, c, count):
    """a, b: the batch norm is a·y + b."""
    mean, rstd = moments(sums, c, count)
    a = tl.load(gamma + c) * rstd
    return a, tl.load(beta + c) - mean * a


@triton.jit
def backward_affine(sums, sums_g, gamma, c, count):
    """a, b, d: with g the gradient at the batch norm's output, the one at its input y is a·g + b·y + d."""
    mean, rstd = moments(sums, c, count)
    g = total(sums_g, 0, c, BACKWARD)
    gx = (total(sums_g, 1, c, BACKWARD) - mean * g) * rstd
    a = tl.load(gamma + c) * rstd
    b = -a * rstd * gx / count
    return a, b, -a * g / count - b * mean


@triton.jit
def note_sums(sums, first, second, c, unit: tl.constexpr):
    """Add what a program has summed up, (BM, BC) each."""
    tl.atomic_add(sums + c, (tl.sum(first, 0) * unit).to(tl.int64), sem="relaxed")
    tl.atomic_add(sums + WIDEST + c, (tl.sum(second, 0) * unit).to(tl.int64), sem="relaxed")


@triton.jit
def add_up(y, sums, rows, share, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Σy and Σy² of every channel. A program sums over `share` rows."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * share
    for done in range(0, share, BM):
        p = begin + done + tl.arange(0, BM)
        v = tl.load(y + p[:, None] * C + c[None, :], (p < rows)[:, None], 0.0).to(tl.float32)
        first += v
        second += v * v
    note_sums(sums, first, second, c, FORWARD)


@triton.jit
def normalise(
    y, sums, gamma, beta, other, other_sums, other_gamma, other_beta, out, rows,
    C: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Batch norm(y) plus a shortcut, then ReLU. OTHER is 0 for no shortcut, 1 for `other`, 2 for batch norm(other)."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    at, ok = p[:, None] * C + c[None, :], (p < rows)[:, None]
    a, b = affine(sums, gamma, beta, c, rows)
    z = tl.load(y + at, ok, 0.0).to(tl.float32) * a[None, :] + b[None, :]
    if OTHER > 0:
        short = tl.load(other + at, ok, 0.0).to(tl.float32)
        if OTHER == 2:
            a2, b2 = affine(other_sums, other_gamma, other_beta, c, rows)
            short = short * a2[None, :] + b2[None, :]
        z += short
    if RELU:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, z.to(out.dtype.element_ty), ok)


@triton.jit
def gather_gradient(
    d, other, extra, x, y, ys, g, sums_g, sums_gs, rows, share,
    AREA: tl.constexpr, C: tl.constexpr, OTHER: tl.constexpr, EXTRA: tl.constexpr, RELU: tl.constexpr,
    SHORT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """g: the gradient before the ReLU at the end of a block, whose output is x, and its sums.

    It comes from d, with OTHER and EXTRA also from there; with an AREA, d is that of the mean over so many pixels. y,
    with SHORT also ys, are the inputs of the batch norms that g meets next.
    """
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    third = tl.zeros([BM, BC], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * share
    for done in range(0, share, BM):
        p = begin + done + tl.arange(0, BM)
        at, ok = p[:, None] * C + c[None, :], (p < rows)[:, None]
        if AREA:
            v = tl.load(d + (p // AREA)[:, None] * C + c[None, :], ok, 0.0).to(tl.float32) / AREA
        else:
            v = tl.load(d + at, ok, 0.0).to(tl.float32)
        if OTHER:
            v += tl.load(other + at, ok, 0.0).to(tl.float32)
        if EXTRA:
            v += tl.load(extra + at, ok, 0.0).to(tl.float32)
        if RELU:
            v = tl.where(tl.load(x + at, ok, 0.0) > 0, v, 0.0)
        tl.store(g + at, v.to(g.dtype.element_ty), ok)
        first += v
        second += v * tl.load(y + at, ok, 0.0).to(tl.float32)
        if SHORT:
            third += v * tl.load(ys + at, ok, 0.0).to(tl.float32)
    note_sums(sums_g, first, second, c, BACKWARD)
    if SHORT:
        note_sums(sums_gs, first, third, c, BACKWARD)


@triton.jit
def add_up_gradient(d, y, sums, gamma, beta, sums_g, rows, share, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Sums of the gradient d after a ReLU as it is before it, where the batch norm of y is above 0."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    a, b = affine(sums, gamma, beta, c, rows)
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * share
    for done in range(0, share, BM):
        p = begin + done + tl.arange(0, BM)
        at, ok = p[:, None] * C + c[None, :], (p < rows)[:, None]
        v = tl.load(y + at, ok, 0.0).to(tl.float32)
        up = tl.where(v * a[None, :] + b[None, :] > 0, tl.load(d + at, ok, 0.0).to(tl.float32), 0.0)
        first += up
        second += up * v
    note_sums(sums_g, first, second, c, BACKWARD)


@triton.jit
def normalise_backward(
    g, y, sums, sums_g, gamma, beta, dy, rows,
    C: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dy: from g, the gradient at a batch norm's output, with RELU after the ReLU there, to the one at its input y."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    at, ok = p[:, None] * C + c[None, :], (p < rows)[:, None]
    up, v = tl.load(g + at, ok, 0.0).to(tl.float32), tl.load(y + at, ok, 0.0).to(tl.float32)
    if RELU:
        scale, offset = affine(sums, gamma, beta, c, rows)
        up = tl.where(v * scale[None, :] + offset[None, :] > 0, up, 0.0)
    a, b, d = backward_affine(sums, sums_g, gamma, c, rows)
    tl.store(dy + at, (up * a[None, :] + v * b[None, :] + d[None, :]).to(dy.dtype.element_ty), ok)


@triton.jit
def normalise_and_pool(
    y, sums, gamma, beta, out, where, pooled, rows,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The largest of 3×3 pixels, at every second pixel of H × W, of ReLU(batch norm(y)); `where` is which of the nine.

    Of equal ones it is the first, as in torch.
    """
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    WO: tl.constexpr = W // 2
    HO: tl.constexpr = H // 2
    right, low, image = p % WO, p // WO % HO, p // (WO * HO)
    a, b = affine(sums, gamma, beta, c, rows)
    best = tl.full([BM, BC], -1.0, tl.float32)
    which = tl.zeros([BM, BC], tl.int32)
    for k in tl.static_range(9):
        row, column = low * 2 + (k // 3 - 1), right * 2 + (k % 3 - 1)
        ok = (p < pooled) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        at = ((image * H + row) * W + column)[:, None] * C + c[None, :]
        v = tl.load(y + at, ok[:, None], 0.0).to(tl.float32) * a[None, :] + b[None, :]
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL).to(out.dtype.element_ty).to(tl.float32)
        better = ok[:, None] & ((v > best) | (v != v))
        best, which = tl.where(better, v, best), tl.where(better, k, which)
    to, live = p[:, None] * C + c[None, :], (p < pooled)[:, None]
    tl.store(out + to, best.to(out.dtype.element_ty), live)
    tl.store(where + to, which.to(tl.int8), live)


@triton.jit
def unpool(d, where, p, c, live, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """The gradient at pixels p, of H × W, from d at the pooled pixels: of the up to four windows that chose it."""
    WO: tl.constexpr = W // 2
    HO: tl.constexpr = H // 2
    right, low, image = p % W, p // W % H, p // (W * H)
    up = tl.zeros([BM, BC], tl.float32)
    for k in tl.static_range(4):
        # The windows around row r have their middles at 2⌊r/2⌋ and, if r is odd, at 2⌊r/2⌋ + 2; columns likewise.
        row, column = low // 2 + k // 2, right // 2 + k % 2
        at_row, at_column = low - 2 * row + 1, right - 2 * column + 1
        ok = live & (row < HO) & (column < WO) & (at_row >= 0) & (at_column >= 0)
        at = ((image * HO + row) * WO + column)[:, None] * C + c[None, :]
        chosen = tl.load(where + at, ok[:, None], -1).to(tl.int32) == (at_row * 3 + at_column)[:, None]
        up += tl.where(chosen, tl.load(d + at, ok[:, None] & chosen, 0.0).to(tl.float32), 0.0)
    return up


@triton.jit
def add_up_unpooled(
    d, where, y, sums, gamma, beta, sums_g, rows, share,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient before the ReLU that is pooled, from d after pooling."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    a, b = affine(sums, gamma, beta, c, rows)
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * share
    for done in range(0, share, BM):
        p = begin + done + tl.arange(0, BM)
        live = p < rows
        v = tl.load(y + p[:, None] * C + c[None, :], live[:, None], 0.0).to(tl.float32)
        up = unpool(d, where, p, c, live, H, W, C, BM, BC)
        up = tl.where(v * a[None, :] + b[None, :] > 0, up, 0.0)
        first += up
        second += up * v
    note_sums(sums_g, first, second, c, BACKWARD)


@triton.jit
def unpooled_backward(
    d, where, y, sums, sums_g, gamma, beta, dy, rows,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dy: from d after pooling, to the gradient at the input y of the batch norm before."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = p < rows
    at = p[:, None] * C + c[None, :]
    v = tl.load(y + at, live[:, None], 0.0).to(tl.float32)
    up = unpool(d, where, p, c, live, H, W, C, BM, BC)
    scale, offset = affine(sums, gamma, beta, c, rows)
    up = tl.where(v * scale[None, :] + offset[None, :] > 0, up, 0.0)
    a, b, e = backward_affine(sums, sums_g, gamma, c, rows)
    tl.store(dy + at, (up * a[None, :] + v * b[None, :] + e[None, :]).to(dy.dtype.element_ty), live[:, None])


@triton.jit
def pixels_to_blocks(x, out, pixels, H: tl.constexpr, W: tl.constexpr, BM: tl.constexpr):
    """Images of 3 channels as rows of 16 numbers: the 2×2 pixels of each channel, then zeros; two rows and columns of
    zeros before and one after, as a 7×7 convolution with stride 2 reads them when it is one of 4×4."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    k = tl.arange(0, 16)
    WO: tl.constexpr = W // 2 + 3
    HO: tl.constexpr = H // 2 + 3
    right, low, image = p % WO - 2, p // WO % HO - 2, p // (WO * HO)
    row, column = (low * 2)[:, None] + (k % 4 // 2)[None, :], (right * 2)[:, None] + (k % 2)[None, :]
    ok = (p < pixels)[:, None] & (k < 12)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    at = ((image[:, None] * H + row) * W + column) * 3 + (k // 4)[None, :]
    tl.store(out + p[:, None] * 16 + k[None, :], tl.load(x + at, ok, 0.0), (p < pixels)[:, None])
