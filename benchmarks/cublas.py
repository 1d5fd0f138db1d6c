"""cuBLASLt's FP8 GEMMs for class dense, called through torch: with block scales and with tensor scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from . import inputs
from .compare import Contestant
from .inputs import Quantized

#: `scaled_mm` takes only multiples of so many rows.
_SCALED_MM_ROWS = 4

#: Fast accumulation keeps about 14 bits of the sum, and K goes up to 18432.
_FAST_TOLERANCE = 2e-2


def scaled_mm(a: Sequence[Quantized], b: Sequence[Quantized]) -> Contestant:
    """`torch.nn.functional.scaled_mm` with 1 x 128 and 128 x 128 scales, the same problem as `gemm_fp8`.

    It takes only multiples of 4 rows, so the first rows stand once more behind the last. A caller could keep
    its activations in buffers of such sizes, so the copy is not timed.
    """
    name = f"scaled_mm-{torch.__version__.split('+')[0]}"
    m = a[0][0].shape[0]
    rows = torch.arange(-(-m // _SCALED_MM_ROWS) * _SCALED_MM_ROWS, device=a[0][0].device) % m
    try:
        kinds = functional.ScalingType
        calls: list[Callable[[], Tensor]] = [
            partial(
                functional.scaled_mm,
                a_fp8.view(torch.uint8)[rows].view(a_fp8.dtype),
                b_fp8.t(),
                _column_major(a_scale[rows]),
                kinds.BlockWise1x128,
                _padded_columns(b_scale),
                kinds.BlockWise128x128,
            )
            for (a_fp8, a_scale), (b_fp8, b_scale) in zip(a, b, strict=True)
        ]
    except Exception as error:
        return Contestant.unavailable(name, error)
    return Contestant(name, calls, lambda: inputs.gemm_error(calls[0]()[:m], *a[0], *b[0]))


def per_tensor(a: Sequence[Quantized], b: Sequence[Quantized]) -> Contestant:
    """`torch._scaled_mm` with one scale for each tensor and fast accumulation.

    It shows what the hardware reaches without block scales. It multiplies the fp8 values without their
    scales, so its product is not the op's product.
    """
    name = "cublaslt per-tensor"
    try:
        one = torch.ones((), device=inputs.DEVICE)
        calls: list[Callable[[], Tensor]] = [
            partial(
                torch._scaled_mm,
                a_fp8,
                b_fp8.t(),
                scale_a=one,
                scale_b=one,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
            for (a_fp8, _), (b_fp8, _) in zip(a, b, strict=True)
        ]
    except Exception as error:
        return Contestant.unavailable(name, error)

    def check() -> float:
        reference = a[0][0].float().double() @ b[0][0].float().double().t()
        return inputs.relative_error(calls[0](), reference)

    return Contestant(name, calls, check, aside=True, tolerance=_FAST_TOLERANCE)


def _column_major(scale: Tensor) -> Tensor:
    """[M, K/128] with strides (1, M); `scaled_mm` wants no padding of M to a multiple of 4."""
    rows, groups = scale.shape
    out = torch.empty_strided((rows, groups), (1, rows), dtype=scale.dtype, device=scale.device)
    return out.copy_(scale)


def _padded_columns(scale: Tensor) -> Tensor:
    """[N/128, K/128] -> [K/128 padded to 4, N/128] with strides (1, K/128 padded to 4)."""
    blocks, groups = scale.shape
    out = torch.zeros(blocks, -(-groups // 4) * 4, dtype=scale.dtype, device=scale.device)
    out[:, :groups] = scale
    return out.t()
