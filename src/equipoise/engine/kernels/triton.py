"""GPU kernels for residual nets of few channels: 3×3 convolutions with the batch norms around them, in Triton.

A ResNet-32 has 16 to 64 channels: a convolution is a few microseconds of memory traffic; what lies between costs more.
Here a convolution sums up what it gives while it has it at hand, so that a batch norm is one light pass.
Activations are rows of channels, one row a pixel: (batch · height · width, channels). Weights are laid out (out, row,
column, in), which is torch's channels-last. `sums` of a batch norm is (REPLICAS, 2, WIDEST): Σy and Σy² of its input y
forward, Σg and Σgy of the gradient g at its output backward; replicas keep programs out of each other's way. They are
whole numbers of 1/FORWARD or 1/BACKWARD, which add up to the same in any order: the same step gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

REPLICAS = tl.constexpr(8)
"""copies of the sums of a batch norm that programs add to by turns"""
WIDEST = tl.constexpr(64)
"""most channels there are: the sums of every batch norm have as many places"""
FORWARD = tl.constexpr(2.0**24)
"""what sums of activations are counted in; they may reach 2^39"""
BACKWARD = tl.constexpr(2.0**40)
"""what sums of gradients are counted in; they may reach 2^23"""
EPS = tl.constexpr(1e-5)
"""of batch norms, as torch has it"""


@triton.jit
def total(sums, which: tl.constexpr, c, unit: tl.constexpr):
    """Σ over the replicas of one of the two sums, for channels c."""
    rows = tl.arange(0, REPLICAS)
    return tl.sum(tl.load(sums + (rows[:, None] * 2 + which) * WIDEST + c[None, :]), 0).to(tl.float32) / unit


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
def add_sums(sums, acc, other, c, C: tl.constexpr, unit: tl.constexpr):
    """Add Σ acc and Σ acc·other over the rows of a tile to a replica of the sums; column k is of channel c[k], of C."""
    first, second = tl.sum(acc, 0), tl.sum(acc * other, 0)
    COLUMNS: tl.constexpr = acc.shape[1]
    if COLUMNS > C:  # several pixels, side by side
        first = tl.sum(tl.reshape(first, (COLUMNS // C, C)), 0)
        second = tl.sum(tl.reshape(second, (COLUMNS // C, C)), 0)
        c = tl.arange(0, C)
    mine = sums + tl.program_id(0) % REPLICAS * 2 * WIDEST + c
    tl.atomic_add(mine, (first * unit).to(tl.int64), sem="relaxed")
    tl.atomic_add(mine + WIDEST, (second * unit).to(tl.int64), sem="relaxed")


@triton.jit
def patch_of(p, H: tl.constexpr, W: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Of the p-th patch of TALL × WIDE pixels: how far right and down it begins, and in which image of H × W."""
    tl.static_assert(H % TALL == 0 and W % WIDE == 0, "patches fill images")
    across: tl.constexpr = W // WIDE
    return p % across * WIDE, p // across % (H // TALL) * TALL, p // (across * (H // TALL))


@triton.jit
def pixels_to_rows(x, mean, std, out, pixels, C: tl.constexpr, S: tl.constexpr, BM: tl.constexpr):
    """Pixels (image, row, column, C) as rows of S numbers: normalised, then zeros."""
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, S)
    ok = (p < pixels)[:, None] & (c < C)[None, :]
    z = tl.load(x + p[:, None] * C + c[None, :], ok, 0).to(tl.float32)
    z = (z - tl.load(mean + c, c < C, 0.0)[None, :]) / tl.load(std + c, c < C, 1.0)[None, :]
    tl.store(out + p[:, None] * S + c[None, :], tl.where(ok, z, 0.0).to(out.dtype.element_ty), (p < pixels)[:, None])


@triton.jit
def conv(
    x, w, y, sums, bias, residual, pixels,
    H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    SUMS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = x ∗ w for images of H × W pixels; with SUMS noting Σy and Σy².

    BIAS, RESIDUAL and RELU are for frozen nets, whose batch norms are folded into weights and biases. Where the STRIDE
    is 1, TALL × WIDE neighbours are computed at a time from the numbers that they share: fewer loads, and zeros among
    the weights. A row of a tile is such a patch, and o counts its outputs.
    """
    tl.static_assert(STRIDE == 1 or TALL * WIDE == 1, "neighbours share numbers where the stride is 1")
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    HO: tl.constexpr = H // STRIDE
    WO: tl.constexpr = W // STRIDE
    right, low, image = patch_of(p, HO, WO, TALL, WIDE)
    live = p * (TALL * WIDE) < pixels
    lower, inner = o // (O * WIDE), o // O % WIDE  # which of the patch
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    ROW: tl.constexpr = (K + WIDE - 1) * I
    STEPS: tl.constexpr = (ROW + BK - 1) // BK
    for step in tl.range(0, (K + TALL - 1) * STEPS, num_stages=AHEAD):
        # A row of neighbours is one stretch of memory: ROW numbers around the patch.
        r, j = step // STEPS, step % STEPS * BK + k
        high = low * STRIDE + (r - K // 2)
        column = (right * STRIDE)[:, None] + (j // I - K // 2)[None, :]
        ok = ((high >= 0) & (high < H) & live)[:, None] & (column >= 0) & (column < W) & (j < ROW)[None, :]
        at = ((image * H + high) * W + right * STRIDE) * I
        tile = tl.load(x + at[:, None] + (j - K // 2 * I)[None, :], ok, 0.0)
        row, tap = (r - lower)[None, :], j[:, None] - (inner * I)[None, :]
        at_w = (o % O)[None, :] * (K * K * I) + row * (K * I) + tap
        ok_w = (row >= 0) & (row < K) & (tap >= 0) & (tap < K * I)
        acc = tl.dot(tile, tl.load(w + at_w, ok_w, 0.0), acc, input_precision="ieee")
    if SUMS:
        add_sums(sums, acc, acc, o % O, O, FORWARD)
    if BIAS:
        acc += tl.load(bias + o % O)[None, :]
    to = (((image * HO + low) * WO + right) * O)[:, None] + (lower * (WO * O) + o % (WIDE * O))[None, :]
    if RESIDUAL:
        acc += tl.load(residual + to, live[:, None], 0.0).to(tl.float32)
    if RELU:
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + to, acc.to(y.dtype.element_ty), live[:, None])


@triton.jit
def normalise(
    y, sums, gamma, beta, other, other_sums, other_gamma, other_beta, out, pixels,
    C: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Batch norm(y) plus a shortcut, then ReLU. OTHER is 0 for no shortcut, 1 for `other`, 2 for batch norm(other)."""
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    at, ok = p[:, None] * C + c[None, :], (p < pixels)[:, None]
    a, b = affine(sums, gamma, beta, c, pixels)
    z = tl.load(y + at, ok, 0.0).to(tl.float32) * a[None, :] + b[None, :]
    if OTHER > 0:
        short = tl.load(other + at, ok, 0.0).to(tl.float32)
        if OTHER == 2:
            a2, b2 = affine(other_sums, other_gamma, other_beta, c, pixels)
            short = short * a2[None, :] + b2[None, :]
        z += short
    if RELU:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, z.to(out.dtype.element_ty), ok)


@triton.jit
def normalise_backward(
    g, y, sums, sums_g, gamma, dy, ys, sums_s, sums_gs, gamma_s, dys, pixels,
    C: tl.constexpr, SHORT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dy: from g, the gradient at a batch norm's output, to the one at its input y; with SHORT also dys for ys."""
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    at, ok = p[:, None] * C + c[None, :], (p < pixels)[:, None]
    up = tl.load(g + at, ok, 0.0).to(tl.float32)
    a, b, d = backward_affine(sums, sums_g, gamma, c, pixels)
    down = up * a[None, :] + tl.load(y + at, ok, 0.0).to(tl.float32) * b[None, :] + d[None, :]
    tl.store(dy + at, down.to(dy.dtype.element_ty), ok)
    if SHORT:
        a, b, d = backward_affine(sums_s, sums_gs, gamma_s, c, pixels)
        down = up * a[None, :] + tl.load(ys + at, ok, 0.0).to(tl.float32) * b[None, :] + d[None, :]
        tl.store(dys + at, down.to(dy.dtype.element_ty), ok)


@triton.jit
def top(
    dh, extra, x, y, g, sums, pixels,
    AREA: tl.constexpr, C: tl.constexpr, EXTRA: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """g: the gradient before the last ReLU, from dh at the mean over pixels and with EXTRA one at the pixels.

    x is the last output, y the input of the batch norm that g meets next.
    """
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    at, ok = p[:, None] * C + c[None, :], (p < pixels)[:, None]
    d = tl.load(dh + (p // AREA)[:, None] * C + c[None, :], ok, 0.0) / AREA
    if EXTRA:
        d += tl.load(extra + at, ok, 0.0).to(tl.float32)
    if RELU:
        d = tl.where(tl.load(x + at, ok, 0.0) > 0, d, 0.0)
    tl.store(g + at, d.to(g.dtype.element_ty), ok)
    add_sums(sums, d, tl.load(y + at, ok, 0.0).to(tl.float32), c, C, BACKWARD)


@triton.jit
def input_gradient(
    dy, w, dys, ws, same, extra, x, y, ys, g, sums, sums_s, pixels,
    H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr,
    SHORT: tl.constexpr, SAME: tl.constexpr, EXTRA: tl.constexpr, RELU: tl.constexpr, BELOW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """g: from dy, the gradient at what a 3×3 convolution gives, to the one before the ReLU whose output x it read.

    x has H × W pixels and I channels. SHORT adds what comes from dys through a 1×1 convolution beside this one; SAME
    what comes around it, and EXTRA what somebody else wants of that place. y, with BELOW also ys, are the inputs of
    the batch norms that g meets next: its sums are noted. TALL × WIDE pixels of x are computed at a time, as in `conv`;
    with a STRIDE of 2, or SHORT, they are STRIDE × STRIDE.
    """
    tl.static_assert((STRIDE == 1 and not SHORT) or (TALL == STRIDE and WIDE == STRIDE), "a patch has one output")
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    across, down, image = patch_of(p, H, W, TALL, WIDE)
    live = p * (TALL * WIDE) < pixels
    lower, inner = i // (I * WIDE), i // I % WIDE  # which of the patch
    HO: tl.constexpr = H // STRIDE
    WO: tl.constexpr = W // STRIDE
    right, low = across // STRIDE, down // STRIDE
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    # Pixel STRIDE · q + row − 1 of x went into pixel q of the output by that row of the window, and columns likewise: a
    # patch into ROWS rows of ROW numbers, the first of them −FIRST from where the patch begins.
    FIRST: tl.constexpr = 1 if STRIDE == 1 else 0
    ROWS: tl.constexpr = (TALL + 1) // STRIDE + 1
    ROW: tl.constexpr = ((WIDE + 1) // STRIDE + 1) * O
    STEPS: tl.constexpr = (ROW + BK - 1) // BK
    for step in tl.range(0, ROWS * STEPS, num_stages=AHEAD):
        r, j = step // STEPS - FIRST, step % STEPS * BK + k
        s = j // O - FIRST
        high, column = low + r, right[:, None] + s[None, :]
        ok = ((high >= 0) & (high < HO) & live)[:, None] & (column >= 0) & (column < WO) & (j < ROW)[None, :]
        at = ((image * HO + high) * WO + right)[:, None] * O + (j - FIRST * O)[None, :]
        row, tap = (lower + 1 - STRIDE * r)[None, :], (inner + 1)[None, :] - STRIDE * s[:, None]  # of the window
        at_w = ((j % O)[:, None] * 9 + row * 3 + tap) * I + (i % I)[None, :]
        weights = tl.load(w + at_w, (row >= 0) & (row < 3) & (tap >= 0) & (tap < 3), 0.0)
        acc = tl.dot(tl.load(dy + at, ok, 0.0), weights, acc, input_precision="ieee")
    if SHORT:  # which led from the first pixel of a patch
        o = tl.arange(0, O)
        at = ((image * HO + low) * WO + right)[:, None] * O + o[None, :]
        weights = tl.load(ws + o[:, None] * I + (i % I)[None, :], (lower + inner == 0)[None, :], 0.0)
        acc = tl.dot(tl.load(dys + at, live[:, None], 0.0), weights, acc, input_precision="ieee")
    at = (((image * H + down) * W + across) * I)[:, None] + (lower * (W * I) + i % (WIDE * I))[None, :]
    ok = live[:, None]
    if SAME:
        acc += tl.load(same + at, ok, 0.0).to(tl.float32)
    if EXTRA:
        acc += tl.load(extra + at, ok, 0.0).to(tl.float32)
    if RELU:
        acc = tl.where(tl.load(x + at, ok, 0.0) > 0, acc, 0.0)
    tl.store(g + at, acc.to(g.dtype.element_ty), ok)
    add_sums(sums, acc, tl.load(y + at, ok, 0.0).to(tl.float32), i % I, I, BACKWARD)
    if BELOW:
        add_sums(sums_s, acc, tl.load(ys + at, ok, 0.0).to(tl.float32), i % I, I, BACKWARD)


@triton.jit
def weight_gradient(
    x, dy, parts, pixels, SHARE: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Parts of the gradient of a convolution's weights, from what it read and the gradient at what it gave.

    Program (q, r, j) sums over the q-th SHARE of the pixels, for row r of the window and the j-th BK of its numbers.
    PAIR takes two neighbours at a time, as WIDE in `conv`: the first pixels of all pairs give one part, and the second
    ones another.
    """
    tl.static_assert(PAIR == 1 or (STRIDE == 1 and W % PAIR == 0), "pairs share numbers, and fill rows")
    part, r = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, PAIR * O)
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    WO: tl.constexpr = W // STRIDE // PAIR
    HO: tl.constexpr = H // STRIDE
    acc = tl.zeros([BK, PAIR * O], tl.float32)
    for first in range(0, SHARE, BP):
        p = part * SHARE + first + tl.arange(0, BP)
        live = p * PAIR < pixels
        across = (p % WO) * (STRIDE * PAIR)
        down = p // WO % HO * STRIDE + (r - K // 2)
        column = across[:, None] + (k // I - K // 2)[None, :]
        inside = (live & (down >= 0) & (down < H))[:, None]
        ok = inside & (column >= 0) & (column < W) & (k < (K + PAIR - 1) * I)[None, :]
        at = ((p // (WO * HO) * H + down) * W + across)[:, None] * I + (k - K // 2 * I)[None, :]
        tile = tl.load(x + at, ok, 0.0)
        given = tl.load(dy + p[:, None] * (PAIR * O) + o[None, :], live[:, None], 0.0)
        acc = tl.dot(tl.trans(tile), given, acc, input_precision="ieee")
    tap = k[:, None] - (o // O * I)[None, :]
    to = ((part * PAIR + o // O) * O + o % O)[None, :] * (K * K * I) + r * (K * I) + tap
    tl.store(parts + to, acc, (tap >= 0) & (tap < K * I))
