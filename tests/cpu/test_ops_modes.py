"""The modes of all ops: at most so many SMs, and calls that load kernels without a launch."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8.errors import ConfigError, UnsupportedError
from moe_fp8.integrations.deep_gemm import modes as deep_gemm_modes
from moe_fp8.jit.driver import ParamBlock
from moe_fp8.ops.modes import Modes
from moe_fp8.ops.parameters import Prepared
from moe_fp8.params import ParamStruct
from moe_fp8.problems import QuantizeProblem
from moe_fp8.specs import kernel_spec
from tests import cases
from tests.cpu.cuda_side import import_cuda_side
from tests.cpu.test_ops_moved import _Launches, launches
from tests.remembered import forget_launches

__all__ = ["launches"]

SPEC = kernel_spec(QuantizeProblem(4, 128))


@pytest.fixture(autouse=True)
def usual_modes() -> Iterator[None]:
    yield
    deep_gemm_modes.set_compile_mode(0)
    moe_fp8.set_num_sms(None)


class Kernel:
    """A kernel that counts its launches."""

    def __init__(self) -> None:
        self.prepared = 0
        self.grids: list[int] = []

    def prepare(self, device: int) -> None:
        self.prepared += 1

    def launch(self, grid: int, stream: int, block: Any, device: int) -> None:
        self.grids.append(grid)


class Cuda:
    """The launcher on CPU tensors, of a GPU with 132 SMs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launch = import_cuda_side("moe_fp8.ops.launch", patch)
        self.kernel = Kernel()
        self.loaded: list[str] = []
        info = SimpleNamespace(name="NVIDIA H100", cc=(9, 0), num_sms=132)
        patch.setattr(self.launch, "device_info", lambda device: info)
        patch.setattr(self.launch, "_raw_stream", lambda device: 0)
        patch.setattr(self.launch, "_exchange_device", lambda device: device)
        patch.setattr(self.launch, "get_kernel", self.load)
        forget_launches(self.launch, patch)
        self.tensor = torch.zeros(3)
        self.call = ("quantize", self.tensor.data_ptr()), (self.tensor,)

    def load(self, spec: Any) -> Kernel:
        self.loaded.append(spec.name)
        return self.kernel

    def once(self) -> None:
        """Make the call: repeat its launch, or launch the kernel with a grid of all SMs that it may use."""
        if not self.launch.repeat(self.call):
            prepared = Prepared(SPEC, self.launch.num_sms(0), ParamBlock(64), ParamStruct("Nothing"))
            form = self.launch.form_of(self.call)
            self.launch.launch(prepared, 0, self.call, form, Modes.changes)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    side = Cuda(monkeypatch)
    side.launch._all_sms.cache_clear()
    yield side
    side.launch._all_sms.cache_clear()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "132"])
def test_a_bad_number_of_sms_is_refused(value: Any) -> None:
    moe_fp8.set_num_sms(100)
    with pytest.raises(ConfigError, match="num_sms"):
        moe_fp8.set_num_sms(value)
    assert Modes.num_sms == 100, "the number before stays"


def test_the_number_of_sms_is_at_most_that_of_the_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    for limit, expected in ((None, 132), (100, 100), (132, 132), (1000, 132), (None, 132)):
        moe_fp8.set_num_sms(limit)
        assert cuda.launch.num_sms(0) == moe_fp8.get_num_sms() == expected


def test_without_a_gpu_there_are_no_sms_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    moe_fp8.set_num_sms(100)
    with pytest.raises(UnsupportedError):
        moe_fp8.get_num_sms()


def test_launches_of_different_limits_are_kept_apart(cuda: Cuda) -> None:
    for limit in (None, 100, 100, None, 64, 100):
        moe_fp8.set_num_sms(limit)
        cuda.once()
    assert cuda.kernel.grids == [132, 100, 100, 132, 64, 100]
    assert len(cuda.loaded) == 3, "three of six calls repeat a launch of the same limit"


def test_compile_only_loads_and_launches_nothing(cuda: Cuda) -> None:
    with moe_fp8.compile_only():
        cuda.once()
        cuda.once()
        with moe_fp8.compile_only():
            pass
        cuda.once()
    assert (len(cuda.loaded), cuda.kernel.prepared, cuda.kernel.grids) == (3, 3, [])
    cuda.once()
    cuda.once()
    assert cuda.kernel.grids == [132, 132] and len(cuda.loaded) == 4, (
        "the next call launches, and is repeated"
    )
    with moe_fp8.compile_only():
        cuda.once()
    assert cuda.kernel.grids == [132, 132], "a remembered launch is not made either"


def test_blocks_of_compile_only_may_end_in_any_order(cuda: Cuda) -> None:
    first, second = moe_fp8.compile_only(), moe_fp8.compile_only()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    cuda.once()
    assert cuda.kernel.grids == [], "the second block has not ended"
    second.__exit__(None, None, None)
    cuda.once()
    assert cuda.kernel.grids == [132]


def test_compile_only_ends_with_an_error(cuda: Cuda) -> None:
    moe_fp8.set_num_sms(100)
    with pytest.raises(KeyError), moe_fp8.compile_only():
        raise KeyError
    cuda.once()
    assert cuda.kernel.grids == [100]


def test_a_call_on_the_cpu_computes_in_every_mode() -> None:
    moe_fp8.set_num_sms(1)
    with moe_fp8.compile_only():
        q, scale = moe_fp8.quantize_fp8(torch.ones(2, 128))
    assert (q.float() * scale == 1).all()


def test_outputs_that_need_no_kernel_are_not_written_within_compile_only(
    launches: _Launches, deep_gemm: ModuleType
) -> None:
    fp8, int32 = torch.float8_e4m3fn, torch.int32
    x, ids = torch.zeros(0, 128, dtype=torch.bfloat16), torch.zeros(0, 2, dtype=int32)
    rows = torch.empty(4, 0, dtype=fp8), torch.empty(4, 0)
    columns = torch.empty(64, 0, dtype=fp8), torch.empty(64, 0)
    weights = torch.empty(64, 0, dtype=fp8), torch.empty(1, 0)
    dense, padded = cases.dense_case(3, 64, 256), cases.contiguous_case("m_indices", (3, 2), 64, 256)
    q, k, k_scale, *others = cases.mqa_case(4, 9, 8).arguments()
    permuted = moe_fp8.moe_permute(x, ids, num_experts=2)
    ragged, total, none = torch.empty(2, 4, 64), torch.empty(3, 64), torch.empty(4, 64)
    product, logits, metadata = padded.poisoned(), torch.empty(4, 5), torch.empty(5, 2, dtype=int32)
    outputs = permuted.offsets, ragged, total, none, product, logits, metadata
    for out in outputs:
        out.fill_(7)
    with moe_fp8.compile_only():
        moe_fp8.moe_permute(x, ids, num_experts=2, out=permuted)
        offsets = torch.zeros(3, dtype=int32)
        moe_fp8.k_grouped_gemm_fp8(*rows, *columns, offsets, out=ragged)
        operands = dense.a, dense.a_scale, dense.b, dense.b_scale
        moe_fp8.gemm_fp8(*operands, c=torch.zeros(3, 64), out=total)
        deep_gemm.fp8_gemm_nt(rows, weights, none)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (padded.a, padded.a_scale), (padded.b, padded.b_scale), product, padded.index,
            ensure_zero_padding=True,
        )  # fmt: skip
        moe_fp8.mqa_logits_fp8(q, k[:0], k_scale[:0], *others, max_seqlen_k=5, fill=True, out=logits)
        moe_fp8.paged_mqa_logits_metadata(torch.zeros(0, dtype=int32), block_size=64, out=metadata)
    assert [bool((out == 7).all()) for out in outputs] == [True] * len(outputs)


def test_deep_gemms_names_for_the_modes(cuda: Cuda) -> None:
    assert deep_gemm_modes.get_compile_mode() == 0
    deep_gemm_modes.set_compile_mode(1)
    deep_gemm_modes.set_compile_mode(1)
    cuda.once()
    assert deep_gemm_modes.get_compile_mode() == 1 and cuda.kernel.grids == []
    deep_gemm_modes.set_compile_mode(0)
    cuda.once()
    assert deep_gemm_modes.get_compile_mode() == 0 and cuda.kernel.grids == [132]
