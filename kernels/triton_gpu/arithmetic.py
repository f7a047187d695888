"""Element-wise functions of Triton kernels, in fp32."""

import triton
import triton.language as tl

# Adding this to |x| < 2**22 leaves the nearest integer, ties to even, in the low bits of the sum.
_ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)

_BF16_PAIR: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high;
    cvt.rn.bf16x2.f32 $0, $4, $3;
    shl.b32 low, $0, 16;
    and.b32 high, $0, 0xffff0000;
    mov.b32 $1, low;
    mov.b32 $2, high;
}""")

_TWO_BF16: tl.constexpr = tl.constexpr("""{
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xffff0000;
}""")


@triton.jit
def to_quantized(x, dtype: tl.constexpr):
    """Rounds fp32 within the range of `dtype` to `dtype`, ties to even."""
    if dtype == tl.int8:
        return (x + _ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return x.to(dtype)


@triton.jit
def nan_maximum(a, b):
    """The larger of a and b, or NaN if either is NaN, so that the scale of a row with NaN is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Rounds fp32 to `dtype`; returns the result in `dtype` and in fp32."""
    if dtype == tl.bfloat16:
        # Converts pairs, because single conversions use the slow unit, which the exponential needs.
        return tl.inline_asm_elementwise(
            _BF16_PAIR, "=r,=f,=f,f,f", [x], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2
        )
    else:
        y = x.to(dtype)
        return y, y.to(tl.float32)


@triton.jit
def to_float32(x, PAIRS: tl.constexpr):
    """Converts to fp32. Pairs of bf16 need two instructions, single values three."""
    if PAIRS and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _TWO_BF16, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def reciprocal(x):
    """1 / x, approximately."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
