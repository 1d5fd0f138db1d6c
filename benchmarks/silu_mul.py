"""Class silu_mul_quantize: the step between an expert's two GEMMs, compared with memory's limit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import moe_fp8

from . import inputs
from .compare import Contestant, Session
from .inputs import Quantized
from .peer import DeepGemm
from .results import Row
from .shapes import SILU_MUL_QUANTIZE, SiluMulShape
from .timing import Call, l2_bytes, plan_rotation

#: Rounding to FP8 makes a relative error of about 2.6e-2.
TOLERANCE = 4e-2


def run_silu_mul_quantize(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Time the op beside torch and `quantize_fp8`, because `peer` has no such op."""
    for terms, shape in session.shapes(step, SILU_MUL_QUANTIZE, (), lambda commit: ()):
        rows, k = sum(shape.counts()), shape.intermediate
        _silu_mul(session, shape, Row("silu_mul_quantize", terms, 0.0, nbytes=silu_mul_bytes(rows, k)))
        torch.cuda.empty_cache()


def silu_mul_bytes(rows: int, k: int) -> float:
    """The least traffic in bytes: gate and up as bf16 inputs, FP8 values and their scales as outputs."""
    return rows * (4.0 * k + k + 4 * (k // 128))


def _exact(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def _error(out: Quantized, x: Tensor, counts: list[int]) -> float:
    """The error of the worst expert; without experts, the error of all rows."""
    worst = 0.0
    whole = x.dim() == 2
    for expert, count in enumerate(counts):
        q, scale, rows = (t if whole else t[expert, :count] for t in (*out, x))
        worst = inputs.worse(worst, inputs.relative_error(inputs.dequantize_rows(q, scale), _exact(rows)))
    return worst


def _unfused(x: Tensor, out: Quantized) -> Quantized:
    gate, up = x.chunk(2, -1)
    return moe_fp8.quantize_fp8(torch.nn.functional.silu(gate) * up, out=out)


def _silu_mul(session: Session, shape: SiluMulShape, row: Row) -> None:
    counts = shape.counts()
    # A set's outputs are used again within the rotation, so their bytes count too.
    num_sets, num_calls = plan_rotation(int(row.nbytes), l2_bytes())
    leading: tuple[int, ...] = (shape.m,)
    masked_m = None
    if shape.num_experts is not None and shape.buffer_rows is not None:
        leading = shape.num_experts, shape.buffer_rows
        masked_m = torch.tensor(counts, device=inputs.DEVICE, dtype=torch.int32)
    size = (*leading, 2 * shape.intermediate)
    sets = [torch.randn(size, device=inputs.DEVICE, dtype=torch.bfloat16) for _ in range(num_sets)]

    def contestant(name: str, calls: list[Call], outs: list[Quantized]) -> Contestant:
        def check() -> float:
            outs[0][0].view(torch.uint8).fill_(0x7F)  # NaN
            calls[0]()
            return _error(outs[0], sets[0], counts)

        return Contestant(name, calls, check)

    outs = [moe_fp8.silu_mul_quantize(x, masked_m=masked_m) for x in sets]
    calls: list[Call] = [
        partial(moe_fp8.silu_mul_quantize, x, masked_m=masked_m, out=out)
        for x, out in zip(sets, outs, strict=True)
    ]
    contestants = [contestant("moe_fp8", calls, outs)]
    if masked_m is None:
        unfused: list[Call] = [partial(_unfused, x, out) for x, out in zip(sets, outs, strict=True)]
        contestants.append(contestant("torch + quantize_fp8", unfused, outs))
    half = max(1, int(row.nbytes) // 2)
    copies: list[Call] = []
    for _ in range(num_sets):
        source, target = torch.randint(256, (2, half), device=inputs.DEVICE, dtype=torch.uint8)
        copies.append(partial(target.copy_, source))
    contestants.append(Contestant("copy", copies, lambda: 0.0, aside=True))
    session.compare(row, contestants, num_calls, TOLERANCE)
