"""Casts to bfloat16 and float8_e4m3fn that are right in Triton's interpreter and on a GPU.

The interpreter's own are wrong (`python -m tests.beds.v2.casts` shows where, as JSON), so a kernel
that is to be tested on a CPU stores what `bfloat16_bits` and `e4m3fn_bits` return, or is tested
with float16, whose casts and dot product the interpreter gets right.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024
Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


@triton.jit
def bfloat16_bits(x: Any) -> Any:
    """float32 to the bits of bfloat16 (uint16): nearest, ties to even, NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where(x == x, rounded, quiet).to(tl.uint16)


@triton.jit
def e4m3fn_bits(x: Any) -> Any:
    """float32 to the bits of float8_e4m3fn (uint8): nearest, ties to even.

    As torch's cast it saturates: above 448, infinities included, it is 448. NaN stays NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # 20 of the 23 bits of the mantissa go; 120 is the difference of the exponents' biases.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the code counts steps of 2**-9: adding 2**23 rounds to whole ones.
    magnitude = size.to(tl.float32, bitcast=True)
    small = (magnitude * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size < 0x3C800000, small, normal)
    # 448.0 has the largest code of a number, 0x7E.
    code = tl.where(size > 0x43E00000, 0x7E, code)
    code = tl.where(x == x, code, 0x7F)
    return (code | sign).to(tl.uint8)


@triton.jit
def bfloat16_value(bits: Any) -> Any:
    """The bits of bfloat16 (uint16) to float32, exactly."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def e4m3fn_value(bits: Any) -> Any:
    """The bits of float8_e4m3fn (uint8) to float32, exactly."""
    code = bits.to(tl.uint32)
    size = code & 0x7F
    normal = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(code < 0x80, value, -value)


@triton.jit
def _cast(x_ptr: Any, out_ptr: Any, count: Any, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _to_bfloat16(x_ptr: Any, out_ptr: Any, count: Any, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, bfloat16_bits(tl.load(x_ptr + at, mask=at < count)), mask=at < count)


@triton.jit
def _to_e4m3fn(x_ptr: Any, out_ptr: Any, count: Any, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, e4m3fn_bits(tl.load(x_ptr + at, mask=at < count)), mask=at < count)


@triton.jit
def _of_bfloat16(x_ptr: Any, out_ptr: Any, count: Any, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, bfloat16_value(tl.load(x_ptr + at, mask=at < count)), mask=at < count)


@triton.jit
def _of_e4m3fn(x_ptr: Any, out_ptr: Any, count: Any, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, e4m3fn_value(tl.load(x_ptr + at, mask=at < count)), mask=at < count)


@triton.jit
def _dot(a_ptr: Any, b_ptr: Any, out_ptr: Any, SIZE: tl.constexpr) -> None:
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [n] in ``dtype``, by Triton's own cast."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _cast[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), SIZE=BLOCK)
    return out


def software_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [n] from or to float32, to or from bfloat16 or float8_e4m3fn, by the casts above."""
    back = dtype == torch.float32
    kernel, bits = {
        (torch.bfloat16, False): (_to_bfloat16, torch.uint16),
        (torch.float8_e4m3fn, False): (_to_e4m3fn, torch.uint8),
        (torch.bfloat16, True): (_of_bfloat16, torch.uint16),
        (torch.float8_e4m3fn, True): (_of_e4m3fn, torch.uint8),
    }[x.dtype if back else dtype, back]
    given = x.view(bits) if back else x
    out = torch.empty(x.shape, dtype=dtype if back else bits, device=x.device)
    kernel[(triton.cdiv(x.numel(), BLOCK),)](given, out, x.numel(), SIZE=BLOCK)
    return out.view(dtype)


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for square matrices [n, n], n a power of two from 16 on; float32, by `tl.dot`."""
    out = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    _dot[(1,)](a, b, out, SIZE=a.shape[0])
    return out


def values() -> torch.Tensor:
    """float32 values: each finite bfloat16, ties, bounds of the formats, random bits; no NaN."""
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    ties = ((torch.arange(1 << 16, dtype=torch.int32) << 16) + 0x8000).view(torch.float32)
    steps = codes(torch.float8_e4m3fn).float()
    steps = steps[steps.isfinite()].sort().values
    between = (steps[1:] + steps[:-1]) / 2
    edges = torch.cat([between, between.nextafter(between.new_tensor(torch.inf))])
    edges = torch.cat([edges, between.nextafter(between.new_tensor(-torch.inf))])
    bound = torch.tensor([448.0, 464.0, 464.00003, 480.0, 2.0**-10, 2.0**-9, 2.0**-6, torch.inf])
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator)
    spread = torch.randn(1 << 16, generator=generator) * 100
    random = bits.to(torch.int32).view(torch.float32)
    found = torch.cat([every, ties, steps, edges, bound, -bound, random, spread])
    return found[~found.isnan()]


def codes(dtype: torch.dtype) -> torch.Tensor:
    """All values of bfloat16 or of float8_e4m3fn, NaN included."""
    bits = torch.int16 if dtype.itemsize == 2 else torch.int8
    return torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32).to(bits).view(dtype)


def wrong(by: Cast, x: torch.Tensor, dtype: torch.dtype) -> list[float]:
    """The values of ``x`` that ``by`` casts otherwise than torch does."""
    one, other = by(x, dtype).float(), x.to(dtype).float()
    same = (one == other) | (one.isnan() & other.isnan())
    return x[~same].float().tolist()


def facts() -> dict[str, Any]:
    """What this process's Triton gets right and wrong; numbers only, for JSON."""
    named = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    x = values()
    nan = torch.tensor([torch.nan, -torch.nan])
    chosen = torch.tensor([1.005859375, 31.7, 17.0, 464.0, 1e-3])
    a, b = (torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)) / 4).unbind()
    exact = a.double() @ b.double()
    narrow = {
        kind: {name: len(wrong(by, x, dtype)) for name, dtype in named.items()}
        for kind, by in (("triton", cast), ("software", software_cast))
    }
    widen = {
        kind: {name: len(wrong(by, codes(dtype), torch.float32)) for name, dtype in named.items()}
        for kind, by in (("triton", cast), ("software", software_cast))
    }
    return {
        "interpreted": triton.knobs.runtime.interpret,
        "values": x.numel(),
        "narrow": narrow,
        "widen": widen,
        "float16": len(wrong(cast, x, torch.float16)),
        "nan": {n: len(wrong(software_cast, nan, dtype)) for n, dtype in named.items()},
        "chosen": {
            # As text: JSON has no NaN.
            name: [str(value) for value in cast(chosen, dtype).float().tolist()]
            for name, dtype in named.items()
        },
        "dot_error": {
            str(dtype).removeprefix("torch."): float(
                (dot(a.to(dtype), b.to(dtype)).double() - exact).abs().max()
            )
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        },
    }


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
