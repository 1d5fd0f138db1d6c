"""Buckets and static buffers of graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from moe_fp8.errors import ArgumentError
from moe_fp8.graph import BatchBuckets, BufferSpec, StaticBuffers
from tests.cpu.graph_inputs import SPECS, inputs


def test_bucket_is_the_smallest_that_holds_the_rows() -> None:
    buckets = BatchBuckets([8, 1, 4, 4])
    assert tuple(buckets) == (1, 4, 8)
    assert [buckets.bucket(rows) for rows in range(1, 9)] == [1, 4, 4, 4, 8, 8, 8, 8]
    for rows in (0, 9):
        with pytest.raises(ArgumentError, match="1 to 8"):
            buckets.bucket(rows)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 40])
def test_up_to_ends_with_the_largest(largest: int) -> None:
    buckets = BatchBuckets.up_to(largest)
    assert buckets.largest == largest
    assert buckets.sizes[0] == 1


@pytest.mark.parametrize("sizes", [[], [0, 4], [-1], [1.5, 2.5], [float("nan")], [None]])
def test_bad_buckets_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ArgumentError):
        BatchBuckets(sizes)


@pytest.mark.parametrize("largest", [0, 8.0, "8"])
def test_up_to_needs_a_positive_integer(largest: int) -> None:
    with pytest.raises(ArgumentError, match="largest"):
        BatchBuckets.up_to(largest)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.uint8, -1),
        (torch.uint8, 300),
        (torch.int32, 1.5),
        (torch.int8, float("nan")),
        (torch.int32, float("inf")),
        (torch.bool, 2),
        (torch.float16, 1e6),
        (torch.float8_e4m3fn, float("inf")),
        (torch.float32, 1e39),
        (torch.int32, None),
        (torch.int32, "3"),
        (torch.float32, 10**400),
        (torch.float8_e8m0fnu, -1),
        (torch.float8_e8m0fnu, 1e-45),
    ],
)
def test_a_pad_that_the_dtype_does_not_hold_is_refused(dtype: torch.dtype, pad: float) -> None:
    with pytest.raises(ArgumentError, match=f"BufferSpec: pad: expected a number that {dtype} holds"):
        BufferSpec((), dtype, pad=pad)
    for held in (
        BufferSpec((), torch.bfloat16, pad=0.1),
        BufferSpec((), dtype),
        BufferSpec((), dtype, pad=1),
    ):
        for device in ("cpu", "meta"):
            assert StaticBuffers({"x": held}, 2, device).view(2)["x"].shape == (2,)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.float32, 2**100), (torch.complex64, -(2**70)), (torch.int64, 2.0**62), (torch.uint64, 2**64 - 1)],
)
def test_a_pad_may_be_any_number_that_the_dtype_holds(dtype: torch.dtype, pad: float) -> None:
    buffers = StaticBuffers({"x": BufferSpec((), dtype, pad=pad)}, 2, "cpu")
    buffers.clear()
    assert buffers.view(2)["x"].tolist() == [pad, pad]


@pytest.mark.parametrize("dtype", [torch.uint4, torch.float4_e2m1fn_x2, torch.qint8])
def test_a_dtype_that_torch_cannot_fill_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=r"BufferSpec: dtype: expected one of torch.bool"):
        BufferSpec((), dtype)


def test_what_is_no_spec_is_named() -> None:
    with pytest.raises(ArgumentError, match="specs: x: expected a BufferSpec, got dtype"):
        StaticBuffers({"x": cast(Any, torch.int32)}, 4, "cpu")


def test_load_records_no_gradients() -> None:
    buffers = StaticBuffers({"x": BufferSpec((3,), torch.float32)}, 4, "cpu")
    buffers.load({"x": torch.ones(2, 3, requires_grad=True)}, 4)
    assert not buffers.view(4)["x"].requires_grad and buffers.view(2)["x"].sum() == 6


def test_host_inputs_are_staged_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default device is, and without their strides."""
    made: list[Any] = []

    def empty_like(value: torch.Tensor, **options: Any) -> torch.Tensor:
        made.append({name: options.pop(name) for name in ("device", "pin_memory")})
        return real(value, device="cpu", **options)

    buffers, real = StaticBuffers(SPECS, 4, "cpu"), torch.empty_like
    buffers.device = torch.device("cuda")
    monkeypatch.setattr(torch, "empty_like", empty_like)
    value = torch.arange(6).view(2, 3).t()
    with torch.device("meta"):
        staged = buffers._staged(value)
    assert staged.device.type == "cpu" and torch.equal(staged, value) and staged is not value
    assert made == [{"device": "cpu", "pin_memory": True}]
    # torch copies other strides once more, to memory that is not pinned.
    assert staged.is_contiguous() and not value.is_contiguous()


def test_only_views_of_the_buffers_are_copied_before_the_load() -> None:
    buffers = StaticBuffers(SPECS, 4, "cpu")
    value = torch.arange(4)
    assert buffers._staged(value) is value
    view = buffers.view(4)["tokens"][2:]
    assert buffers._staged(view).data_ptr() != view.data_ptr()


def _moved(tensor: torch.Tensor) -> None:
    """Move the tensor's memory, as `multiprocessing.Queue.put` does."""
    tensor.share_memory_()


@pytest.mark.parametrize("moved", [_moved, lambda tensor: None])
def test_buffers_know_their_memory_in_a_copy_and_after_a_move(moved: Callable[[torch.Tensor], None]) -> None:
    first, last = torch.tensor([1, 2]), torch.tensor([3, 4])
    specs = {name: BufferSpec((), torch.int64) for name in ("first", "last")}
    buffers = copy.deepcopy(StaticBuffers(specs, 2, "cpu"))
    buffers.load({"first": first, "last": last}, 2)
    held = buffers.view(2)
    moved(held["first"])
    buffers.load({"first": held["last"], "last": held["first"]}, 2)
    assert (held["first"].tolist(), held["last"].tolist()) == ([3, 4], [1, 2])


def test_load_copies_and_pads_in_place() -> None:
    buffers = StaticBuffers(SPECS, 8, "cpu")
    view = buffers.view(4)
    assert buffers.load(inputs(4), 4) == 4
    assert view["tokens"].tolist() == [1, 2, 3, 4]
    # A smaller batch must not leave rows of the batch before it.
    assert buffers.load(inputs(2), 4) == 2
    assert view["tokens"].tolist() == [1, 2, -1, -1]
    assert view["table"].tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tokens": torch.arange(2, dtype=torch.int32)}, "tokens"),
        ({"table": torch.zeros(3, 3, dtype=torch.int32)}, "table"),
        ({"table": torch.zeros(2, 4, dtype=torch.int32)}, "table"),
        ({"table": torch.zeros(2, 3, dtype=torch.int32).to_sparse()}, "table"),
        ({"table": torch.zeros(2, 3, dtype=torch.int32, device="meta")}, "table"),
        ({"other": torch.zeros(2)}, "inputs"),
        ({3: torch.zeros(2)}, "inputs"),
    ],
)
def test_load_refuses_what_does_not_fit(change: dict[Any, torch.Tensor], name: str) -> None:
    buffers = StaticBuffers(SPECS, 8, "cpu")
    with pytest.raises(ArgumentError) as error:
        buffers.load({**inputs(2), **change}, 4)
    assert error.value.argument == name
    assert buffers.view(8)["tokens"].tolist() == [-1] * 8


def test_load_refuses_a_bucket_that_does_not_hold_the_rows() -> None:
    buffers = StaticBuffers(SPECS, 8, "cpu")
    for bucket in (1, 9):
        with pytest.raises(ArgumentError, match="2 to 8 requests"):
            buffers.load(inputs(2), bucket)
    for wrong in ([torch.zeros(2)], None):
        with pytest.raises(ArgumentError, match="a mapping of the names"):
            buffers.load(wrong, 4)  # type: ignore[arg-type]
    for bucket in (9, -1, 2.5, "2"):
        with pytest.raises(ArgumentError, match=r"StaticBuffers.view: bucket"):
            buffers.view(bucket)  # type: ignore[arg-type]
    for bucket in (2.5, "2", None):
        with pytest.raises(ArgumentError, match=r"BatchBuckets.bucket: requests: expected an integer"):
            BatchBuckets([4]).bucket(bucket)  # type: ignore[arg-type]
    for bucket in (4.0, "4", None):
        with pytest.raises(ArgumentError, match=r"StaticBuffers.load: bucket: expected an integer"):
            buffers.load(inputs(2), bucket)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="specs: expected a mapping of names to specs, got list"):
        StaticBuffers(list(SPECS), 8, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at least one buffer"):
        StaticBuffers({}, 8, "cpu")


@pytest.mark.parametrize("requests", [1, 3, 4])
def test_load_leaves_no_row_of_an_earlier_load(requests: int) -> None:
    """Not even in the last request of a bucket, or in the last token of a request."""
    specs = {"tokens": BufferSpec((), torch.int64, pad=-1, rows=2), "lengths": BufferSpec((), torch.int32)}
    buffers = StaticBuffers(specs, 4, "cpu")

    def load(requests: int, value: int) -> dict[str, list[int]]:
        tokens, lengths = torch.full((2 * requests,), value), torch.full((requests,), value).int()
        buffers.load({"tokens": tokens, "lengths": lengths}, 4)
        return {name: tensor.tolist() for name, tensor in buffers.view(4).items()}

    load(4, 7)
    padded = 4 - requests
    assert load(requests, 5) == {
        "tokens": [5] * 2 * requests + [-1] * 2 * padded, "lengths": [5] * requests + [0] * padded
    }  # fmt: skip
