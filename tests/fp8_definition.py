"""FP8 quantization by its written definition, in Python's own arithmetic."""

from __future__ import annotations

import math
import struct


def f32(value: float) -> float:
    """`value` rounded to fp32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _fp8_values() -> list[float]:
    """Every non-negative float8_e4m3fn value, by the format's definition."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        values.append((mantissa / 8) * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7))
    return values


FP8_VALUES = _fp8_values()


def fp8_code(value: float) -> int:
    """The byte of the float8_e4m3fn value nearest to `value`; ties go to even."""
    magnitude = abs(value)
    nearest = min(range(len(FP8_VALUES)), key=lambda code: (abs(FP8_VALUES[code] - magnitude), code & 1))
    return nearest | (0x80 if math.copysign(1, value) < 0 else 0)


def quantize_group(group: list[float], power_of_two: bool) -> tuple[list[int], float]:
    """The FP8 bytes and the scale of one group."""
    amax = max(max(abs(value) for value in group), f32(1e-10))
    scale = f32(amax / 448.0)
    if power_of_two:
        mantissa, exponent = math.frexp(scale)
        scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
    inverse = f32(1.0 / scale)
    return [fp8_code(max(-448.0, min(448.0, f32(value * inverse)))) for value in group], scale
