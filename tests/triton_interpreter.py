"""Casts and matrix products in Triton's CPU interpreter, which keeps bf16 as 16-bit integers.

Unpatched, its product multiplies bit patterns and its casts cut digits off. `install` makes casts
round to nearest even. A product is summed in fp64 and rounded once, since numpy's fp32 product
gives a row other bits at another place on some CPUs. For kernel logic only: what the interpreter
computes says nothing of a GPU's bits.

Unpatched, it also goes through the whole of triton.language at every call of a device function:
most of its time. Once for each launch is enough.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns as fp32 values."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 values rounded to nearest even, as bf16 bit patterns."""
    pattern = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (pattern >> np.uint32(16)) & np.uint32(1)
    rounded = ((pattern + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def install() -> None:
    """Patch the interpreter's builder; needs TRITON_INTERPRET=1 before triton is first imported."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    stock_cast, stock_dot = builder.cast_impl, builder.create_dot
    stock_patch = interpreter._patch_lang

    def cast_impl(self, source, target):
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return handle(widen(source.data), target.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return handle(narrow(source.data), target.scalar)
        return stock_cast(self, source, target)

    def create_dot(self, a, b, d, *rest):
        if d.dtype.scalar not in (tl.float32, tl.float64):
            return stock_dot(self, a, b, d, *rest)
        wide = [
            (widen(x.data) if x.dtype.scalar == tl.bfloat16 else x.data).astype(np.float64)
            for x in (a, b)
        ]
        return handle((wide[0] @ wide[1] + d.data).astype(d.data.dtype), d.dtype.scalar)

    @functools.cache
    def languages(function):
        values = function.__globals__.values()
        return [lang for lang in (tl, tl.core) if any(value is lang for value in values)]

    def patch_lang(function):
        is_patched = not any(tl.core.is_builtin(lang.load) for lang in languages(function))
        return None if is_patched else stock_patch(function)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    interpreter._patch_lang = patch_lang
