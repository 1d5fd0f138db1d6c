"""The shares of a step's time: which kernel an instant belongs to, and which kind a kernel is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from benchmarks import full_size
from benchmarks.shares import IDLE, Span, attribute, kinds, shares, steps


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("a", 2, 5), ("b", 5, 6)], {"a": 3, "b": 1, IDLE: 0}),
        ([("b", 7, 9), ("a", 2, 5)], {"a": 3, "b": 2, IDLE: 2}),
        ([("a", 0, 10), ("b", 4, 15)], {"a": 10, "b": 5, IDLE: 0}),
        ([("a", 0, 10), ("b", 4, 9), ("c", 12, 13)], {"a": 10, "b": 0, "c": 1, IDLE: 2}),
        # From 10 on, b and c run, and b started first.
        ([("c", 7, 20), ("a", 0, 10), ("b", 5, 15)], {"a": 10, "b": 5, "c": 5, IDLE: 0}),
        ([("a", 0, 10), ("b", 2, 12), ("c", 3, 6), ("a", 11, 14)], {"a": 12, "b": 2, "c": 0, IDLE: 0}),
        ([], {IDLE: 0}),
    ],
    ids=["one after the other", "gap", "overlap", "nested", "three at once", "nested in the second", "none"],
)
def test_an_instant_belongs_to_the_kernel_that_started_first(
    spans: list[tuple[str, float, float]], expected: dict[str, float]
) -> None:
    names = {"a": "moe_permute", "b": "moe_combine", "c": "nvjet_tst_64x8"}
    kind = {"a": "moe_permute", "b": "moe_combine", "c": "torch matmul", IDLE: IDLE}
    found = attribute(Span(names[name], start, end) for name, start, end in spans)
    assert found == {kind[name]: time for name, time in expected.items()}
    if spans:
        assert sum(found.values()) == max(end for *_, end in spans) - min(start for _, start, _ in spans)


def test_a_gemm_between_permute_and_combine_is_the_experts() -> None:
    names = [
        "gemm_fp8",
        "moe_permute",
        "gemm_fp8",
        "silu_mul_quantize",
        "gemm_fp8",
        "moe_combine",
        "gemm_fp8",
    ]
    dense, grouped = "gemm_fp8, dense", "gemm_fp8, grouped"
    expected = [dense, "moe_permute", grouped, "silu_mul_quantize", grouped, "moe_combine", dense]
    assert list(kinds(names)) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("paged_mqa_logits_fp8", "paged_mqa_logits_fp8"),
        ("indexer_topk", "indexer_topk"),
        ("route_topk", "route_topk"),
        ("nvjet_sss_64x64_64x16_4x2_h_bz_TNN", "torch matmul"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(...)", "torch matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "torch matmul"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 11>(...)", "torch softmax"),
        (
            "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<...>>",
            "torch index",
        ),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "torch copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "torch copy"),
        ("Memcpy DtoD (Device -> Device)", "torch copy"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ...>>", "torch reduction"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "torch elementwise"),
        ("a kernel of nobody", "torch other"),
    ],
)  # fmt: skip
def test_the_name_tells_the_kind(name: str, kind: str) -> None:
    assert list(kinds([name])) == [kind]


def test_steps_are_cut_at_the_longest_pauses() -> None:
    first, second, third = (
        [Span("a", at, at + 9), Span("b", at + 2, at + 5), Span("c", at + 12, at + 13)]
        for at in (1000, 1100, 2000)
    )
    spans = [*third, *first, *second]
    assert steps(spans, 3) == [first, second, third]
    assert steps(spans, 2) == [[*first, *second], third]
    assert steps(spans, 1) == [[*first, *second, *third]]


def test_shares_are_of_all_steps_without_the_pauses() -> None:
    one = [Span("route_topk", 0, 1), Span("Memset", 1, 3)]
    other = [Span("route_topk", 100, 103), Span("Memset", 104, 105)]
    found = shares([one, other])
    assert list(found.items()) == [("route_topk", 0.5), ("torch copy", 0.375), (IDLE, 0.125)]


def test_a_profile_gives_shares_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile:
        """A profiler that sees two kernels of each replay: 30 us, 10 us of pause, 60 us."""

        def __init__(self, activities: Any) -> None: ...

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None: ...

        def events(self) -> list[Any]:
            spans = [("indexer_topk", 0, 30), ("gemm_fp8", 40, 100)]
            return [
                SimpleNamespace(
                    name=name,
                    device_type=kind,
                    time_range=SimpleNamespace(start=at + start, end=at + end),
                )
                for at in range(0, 1000 * len(replays), 1000)
                for name, start, end in spans
                for kind in (DeviceType.CUDA, DeviceType.CPU)
            ]

    replays: list[int] = []
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(full_size, "_PAUSE", 0)
    notes = full_size._profile(lambda: replays.append(0))
    assert len(replays) == 6
    assert notes == {
        "shares": {"gemm_fp8, dense": 0.6, "indexer_topk": 0.3, "idle": 0.1},
        "profiled us": 100,
    }
    monkeypatch.setattr(Profile, "events", lambda self: [])
    with pytest.raises(RuntimeError, match="no kernel"):
        full_size._profile(lambda: None)
