"""The row kernels of the fused losses for NVIDIA GPUs; what each computes is said in `kernels_torch`.

One program a row. Exponentials and logarithms are the card's own, in base 2: an error of 2^-22, below what fp16 logits
carry. Reductions are kept a lane until the end of the row, so that a block of columns needs no barrier.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf.losses.fused import kernels_torch
from rlhf.losses.fused.kernels_torch import EXCLUDED, GROUP, RowStatistics, Transform

LOG2_E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
BLOCK, WARPS = 2048, 8


@triton.jit
def _exp2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _log2(x):
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _raw(pointer, bias_pointer, columns, n, HAS_BIAS: tl.constexpr):
    """Raw logits with their bias; excluded ones far below all others."""
    x = tl.load(pointer + columns, mask=columns < n, other=-60000.0).to(tl.float32)
    if HAS_BIAS:
        x = tl.where(x > -60000.0, x + tl.load(bias_pointer + columns, mask=columns < n, other=0.0).to(tl.float32), x)
    return x


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (_exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def _logits(x, c, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """In base 2 and at the temperature: c = log2(e) / temperature, with the scale where there is no soft cap."""
    return tl.where(x > -59999.0, softcap * _tanh(x * scale / softcap) * c, -60000.0) if HAS_SOFTCAP else x * c


@triton.jit
def _load(row_pointer, bias_pointer, columns, n, c, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Logits of some columns, see `_logits`."""
    return _logits(_raw(row_pointer, bias_pointer, columns, n, HAS_BIAS), c, scale, softcap, HAS_SOFTCAP)


@triton.jit
def _slope(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """d logit / d raw at temperature 1; the scale where there is no soft cap is in the weights already."""
    tanh = _tanh(x * scale / softcap) if HAS_SOFTCAP else 0.0
    return (1.0 - tanh * tanh) * (scale if HAS_SOFTCAP else 1.0)


@triton.jit
def _statistics_kernel(
    x_pointer, x_stride, x_bias, cx, x_scale, x_cap, y_pointer, y_stride, y_bias, cy, y_scale, y_cap, out, n, rows,
    PAIR: tl.constexpr, GAPS: tl.constexpr,
    X_BIAS: tl.constexpr, X_CAP: tl.constexpr, Y_BIAS: tl.constexpr, Y_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row = x_pointer + row * x_stride
    y_row = y_pointer + row * y_stride
    lanes = tl.arange(0, BLOCK)
    x_max = tl.full([BLOCK], -60000.0, tl.float32)
    y_max = tl.full([BLOCK], -60000.0, tl.float32)
    x_sum = tl.zeros([BLOCK], tl.float32)
    x_dot = tl.zeros([BLOCK], tl.float32)
    x_gap = tl.zeros([BLOCK], tl.float32)
    y_sum = tl.zeros([BLOCK], tl.float32)
    y_gap = tl.zeros([BLOCK], tl.float32)
    # Four blocks at a time share one rescaling of what has been summed.
    for start in range(0, n, 4 * BLOCK):
        a = start + lanes
        b = a + BLOCK
        c = b + BLOCK
        d = c + BLOCK
        x_a = _load(x_row, x_bias, a, n, cx, x_scale, x_cap, X_BIAS, X_CAP)
        x_b = _load(x_row, x_bias, b, n, cx, x_scale, x_cap, X_BIAS, X_CAP)
        x_c = _load(x_row, x_bias, c, n, cx, x_scale, x_cap, X_BIAS, X_CAP)
        x_d = _load(x_row, x_bias, d, n, cx, x_scale, x_cap, X_BIAS, X_CAP)
        largest = tl.maximum(tl.maximum(x_max, tl.maximum(x_a, x_b)), tl.maximum(x_c, x_d))
        rescale = _exp2(x_max - largest)
        x_max = largest
        p_a = _exp2(x_a - largest)
        p_b = _exp2(x_b - largest)
        p_c = _exp2(x_c - largest)
        p_d = _exp2(x_d - largest)
        x_sum = x_sum * rescale + ((p_a + p_b) + (p_c + p_d))
        x_dot = x_dot * rescale + ((p_a * x_a + p_b * x_b) + (p_c * x_c + p_d * x_d))
        if PAIR:
            y_a = _load(y_row, y_bias, a, n, cy, y_scale, y_cap, Y_BIAS, Y_CAP)
            y_b = _load(y_row, y_bias, b, n, cy, y_scale, y_cap, Y_BIAS, Y_CAP)
            y_c = _load(y_row, y_bias, c, n, cy, y_scale, y_cap, Y_BIAS, Y_CAP)
            y_d = _load(y_row, y_bias, d, n, cy, y_scale, y_cap, Y_BIAS, Y_CAP)
            largest = tl.maximum(tl.maximum(y_max, tl.maximum(y_a, y_b)), tl.maximum(y_c, y_d))
            y_rescale = _exp2(y_max - largest)
            y_max = largest
            q_a = _exp2(y_a - largest)
            q_b = _exp2(y_b - largest)
            q_c = _exp2(y_c - largest)
            q_d = _exp2(y_d - largest)
            y_sum = y_sum * y_rescale + ((q_a + q_b) + (q_c + q_d))
            if GAPS:
                a_gap = x_a - y_a
                b_gap = x_b - y_b
                c_gap = x_c - y_c
                d_gap = x_d - y_d
                x_gap = x_gap * rescale + ((p_a * a_gap + p_b * b_gap) + (p_c * c_gap + p_d * d_gap))
                y_gap = y_gap * y_rescale - ((q_a * a_gap + q_b * b_gap) + (q_c * c_gap + q_d * d_gap))
    largest = tl.max(x_max, 0)
    rescale = _exp2(x_max - largest)
    total = tl.maximum(tl.sum(x_sum * rescale, 0), 1e-37)
    tl.store(out + row, (largest + _log2(total)) * LN2)
    tl.store(out + rows + row, tl.sum(x_dot * rescale, 0) / total * LN2)
    if PAIR:
        largest = tl.max(y_max, 0)
        y_rescale = _exp2(y_max - largest)
        y_total = tl.maximum(tl.sum(y_sum * y_rescale, 0), 1e-37)
        tl.store(out + 2 * rows + row, (largest + _log2(y_total)) * LN2)
        if GAPS:
            tl.store(out + 3 * rows + row, tl.sum(x_gap * rescale, 0) / total * LN2)
            tl.store(out + 4 * rows + row, tl.sum(y_gap * y_rescale, 0) / y_total * LN2)


@triton.jit
def _moments_kernel(
    x_pointer, x_stride, x_bias, cx, x_scale, x_cap, y_pointer, y_stride, y_bias, cy, y_scale, y_cap, out, n, rows,
    beta, x_log_z, y_log_z,
    X_BIAS: tl.constexpr, X_CAP: tl.constexpr, Y_BIAS: tl.constexpr, Y_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row = x_pointer + row * x_stride
    y_row = y_pointer + row * y_stride
    x_z = tl.load(x_log_z + row) * LOG2_E
    y_z = tl.load(y_log_z + row) * LOG2_E
    lanes = tl.arange(0, BLOCK)
    of_x = tl.zeros([BLOCK], tl.float32)
    of_y = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + lanes
        log_p = _load(x_row, x_bias, columns, n, cx, x_scale, x_cap, X_BIAS, X_CAP) - x_z
        log_q = _load(y_row, y_bias, columns, n, cy, y_scale, y_cap, Y_BIAS, Y_CAP) - y_z
        p = _exp2(log_p)
        q = _exp2(log_q)
        log_m = _log2(tl.maximum(beta * q + (1.0 - beta) * p, 1e-37))
        of_x += p * (log_p - log_m)
        of_y += q * (log_q - log_m)
    tl.store(out + row, tl.sum(of_x, 0) * LN2)
    tl.store(out + rows + row, tl.sum(of_y, 0) * LN2)


@triton.jit
def _divergence_gradient_kernel(
    x_pointer, x_stride, x_bias, cx, x_scale, x_cap, y_pointer, y_stride, y_bias, cy, y_scale, y_cap, n, width,
    beta, x_log_z, y_log_z, mean, weights, outer,
    MODE: tl.constexpr, X_BIAS: tl.constexpr, X_CAP: tl.constexpr, Y_BIAS: tl.constexpr, Y_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_row = x_pointer + row * x_stride
    raw = _raw(x_row, x_bias, columns, n, X_BIAS)
    x = _logits(raw, cx, x_scale, x_cap, X_CAP)
    y = _load(y_pointer + row * y_stride, y_bias, columns, n, cy, y_scale, y_cap, Y_BIAS, Y_CAP)
    log_p = x - tl.load(x_log_z + row) * LOG2_E
    log_q = y - tl.load(y_log_z + row) * LOG2_E
    weight = tl.load(weights + row) * outer
    p = _exp2(log_p)
    if MODE == 0:
        gradient = weight * (p - _exp2(log_q))
    elif MODE == 1:
        gradient = weight * p * ((x - y) * LN2 - tl.load(mean + row))
    else:
        log_m = _log2(tl.maximum(beta * _exp2(log_q) + (1.0 - beta) * p, 1e-37))
        gradient = weight * (1.0 - beta) * p * ((log_p - log_m) * LN2 - tl.load(mean + row))
    gradient *= _slope(raw, x_scale, x_cap, X_CAP)
    gradient = tl.where(columns < n, gradient, 0.0)
    tl.store(x_row + columns, gradient.to(x_pointer.dtype.element_ty), mask=columns < width)


@triton.jit
def _softmax_gradient_kernel(
    x_pointer, x_stride, x_bias, cx, x_scale, x_cap, out_pointer, n, width, a, log_u, b, log_v, outer,
    X_BIAS: tl.constexpr, X_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_row = x_pointer + row * x_stride
    raw = _raw(x_row, x_bias, columns, n, X_BIAS)
    x = _logits(raw, cx, x_scale, x_cap, X_CAP)
    gradient = tl.load(a + row) * _exp2(x - tl.load(log_u + row) * LOG2_E)
    gradient += tl.load(b + row) * _exp2(x - tl.load(log_v + row) * LOG2_E)
    gradient *= outer * _slope(raw, x_scale, x_cap, X_CAP)
    gradient = tl.where((columns < n) & (raw > -60000.0), gradient, 0.0)
    tl.store(out_pointer + row * x_stride + columns, gradient.to(out_pointer.dtype.element_ty), mask=columns < width)


def statistics(
    x: Tensor,
    transform: Transform,
    columns: int,
    temperature: float = 1.0,
    y: Tensor | None = None,
    transform_y: Transform | None = None,
    gaps: bool = False,
) -> tuple[RowStatistics, RowStatistics | None]:
    """See `kernels_torch.statistics`."""
    rows, out = len(x), torch.empty(5, len(x), device=x.device)
    other, transform_other = (x, transform) if y is None else (y, transform_y)
    assert transform_other is not None
    _statistics_kernel[(rows,)](
        *_block(x, transform, temperature), *_block(other, transform_other, temperature), out, columns, rows,
        PAIR=y is not None, GAPS=gaps, **_flags("X", transform), **_flags("Y", transform_other),
        BLOCK=BLOCK // 2 if gaps else BLOCK, num_warps=WARPS,
    )  # fmt: skip
    log_zx, mean, log_zy, gap_x, gap_y = out
    of_x = RowStatistics(log_zx, mean, gap_x if gaps else None)
    return of_x, None if y is None else RowStatistics(log_zy, None, gap_y if gaps else None)


def mixture_moments(
    x: Tensor,
    y: Tensor,
    transform: Transform,
    transform_y: Transform,
    columns: int,
    temperature: float,
    beta: float,
    log_zx: Tensor,
    log_zy: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `kernels_torch.mixture_moments`."""
    rows, out = len(x), torch.empty(2, len(x), device=x.device)
    _moments_kernel[(rows,)](
        *_block(x, transform, temperature), *_block(y, transform_y, temperature), out, columns, rows,
        beta, log_zx, log_zy, **_flags("X", transform), **_flags("Y", transform_y),
        BLOCK=2 * BLOCK, num_warps=2 * WARPS,
    )  # fmt: skip
    return out[0], out[1]


def divergence_gradient_(
    x: Tensor,
    y: Tensor,
    transform: Transform,
    transform_y: Transform,
    columns: int,
    temperature: float,
    beta: float,
    log_zx: Tensor,
    log_zy: Tensor,
    mean: Tensor | None,
    weights: Tensor,
) -> None:
    """See `kernels_torch.divergence_gradient_`."""
    rows, width = x.shape
    mode = 0 if beta == 0 else 1 if beta == 1 else 2
    _divergence_gradient_kernel[(rows, triton.cdiv(width, 2 * BLOCK))](
        *_block(x, transform, temperature), *_block(y, transform_y, temperature), columns, width,
        beta, log_zx, log_zy, weights if mean is None else mean, weights, _outer(transform, temperature),
        MODE=mode, **_flags("X", transform), **_flags("Y", transform_y), BLOCK=2 * BLOCK, num_warps=WARPS,
    )  # fmt: skip


def softmax_gradient_(
    x: Tensor,
    transform: Transform,
    columns: int,
    temperature: float,
    a: Tensor,
    log_u: Tensor,
    b: Tensor,
    log_v: Tensor,
    out: Tensor,
) -> None:
    """See `kernels_torch.softmax_gradient_`."""
    assert out.stride() == x.stride()
    rows, width = x.shape
    _softmax_gradient_kernel[(rows, triton.cdiv(width, 2 * BLOCK))](
        *_block(x, transform, temperature), out, columns, width,
        a, log_u, b, log_v, _outer(transform, temperature), **_flags("X", transform), BLOCK=2 * BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _maxima_kernel(x_pointer, x_stride, out, groups, n, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_pointer + row * x_stride + columns, mask=columns < n, other=-60000.0)
    tl.store(out + row * groups + group, tl.max(x, 1), mask=group < groups)


def top(x: Tensor, transform: Transform, columns: int, k: int) -> tuple[Tensor, Tensor]:
    """See `kernels_torch.top`. The k largest are in the k groups with the largest maxima."""
    rows, groups = len(x), triton.cdiv(columns, GROUP)
    if transform.bias is not None or transform.scale < 0 or k >= groups:
        return kernels_torch.top(x, transform, columns, k)  # another order than the raw logits', or nothing to gain
    maxima = torch.empty(rows, groups, dtype=x.dtype, device=x.device)
    _maxima_kernel[(rows, triton.cdiv(groups, 32))](
        x, x.stride(0), maxima, groups, columns, GROUP=GROUP, GROUPS=32, num_warps=WARPS
    )
    chosen = maxima.topk(k, sorted=False).indices
    grouped = x.as_strided((rows, groups, GROUP), (x.stride(0), GROUP, 1))
    candidates = grouped.gather(1, chosen[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    raw, place = candidates.topk(k)
    logits, _ = transform(raw.float(), None)
    return logits, chosen.gather(1, place // GROUP) * GROUP + place % GROUP


@triton.jit
def _cast_kernel(source, target, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + index, mask=index < n)
    tl.store(target + index, values.to(target.dtype.element_ty), mask=index < n)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values.to(dtype)`, at the speed of the memory; torch's takes twice as long from bfloat16 to float16."""
    if values.dtype == dtype or not values.is_contiguous():
        return values.to(dtype)
    target = torch.empty_like(values, dtype=dtype)
    _cast_kernel[(triton.cdiv(values.numel(), 8192),)](values, target, values.numel(), BLOCK=8192, num_warps=8)
    return target


def _block(x: Tensor, transform: Transform, temperature: float) -> tuple[object, ...]:
    """What a kernel is told about a block of raw logits."""
    assert x.stride(1) == 1
    c = LOG2_E.value / temperature * (transform.scale if transform.softcap is None else 1.0)
    assert c * -EXCLUDED > 50, "an excluded column would get a probability: the temperature is too high for the scale"
    bias = x if transform.bias is None else transform.bias
    return x, x.stride(0), bias, c, transform.scale, transform.softcap or 1.0


def _outer(transform: Transform, temperature: float) -> float:
    """The constant part of d logit / d raw."""
    return (transform.scale if transform.softcap is None else 1.0) / temperature


def _flags(side: str, transform: Transform) -> dict[str, bool]:
    return {f"{side}_BIAS": transform.bias is not None, f"{side}_CAP": transform.softcap is not None}


assert EXCLUDED == -60000.0, "kernels can't read a global: it is written out in them"
