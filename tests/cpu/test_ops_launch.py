"""Launches from any thread, on any device, and only for plain tensors, with a fake libcuda."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from moe_fp8.jit import driver
from moe_fp8.jit.driver import ParamBlock
from moe_fp8.ops import registry
from moe_fp8.ops.keys import Call
from moe_fp8.ops.parameters import Prepared
from moe_fp8.params import ParamStruct
from moe_fp8.settings import parse_settings
from moe_fp8.specs import KernelSpec
from tests import cases
from tests.cpu.cuda_side import import_cuda_side
from tests.cpu.test_jit_driver import _ARTIFACT, FakeDriver
from tests.remembered import forget_launches


class StrictDriver(FakeDriver):
    """Counts failed launches, because a failed launch would end a capture."""

    failed = 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        result = super().cuLaunchKernelEx(config, function, params, extra)
        self.failed += int(result[0]) != 0
        return result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> StrictDriver:
    api = StrictDriver()
    monkeypatch.setattr(driver, "_driver", lambda: api)
    return api


@pytest.fixture
def launch(fake: StrictDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`moe_fp8.ops.launch` with one kernel, loaded on device 0; the context gives the current device."""
    module = import_cuda_side("moe_fp8.ops.launch", monkeypatch)
    kernel = driver.load(_ARTIFACT, 100_000, 128)
    monkeypatch.setattr(module, "get_kernel", lambda spec: kernel)
    monkeypatch.setattr(module, "_raw_stream", lambda device: 0x7000)
    monkeypatch.setattr(module, "_exchange_device", lambda device: device)
    forget_launches(module, monkeypatch)
    yield module


@pytest.mark.parametrize("current", [0, 1])
def test_the_device_is_made_current_and_then_as_it_was(
    launch: ModuleType, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if torch only says so: it tells the device that it would make current at its next use."""
    devices: list[int] = []

    def exchange(device: int) -> int:
        devices.append(device)
        return current

    monkeypatch.setattr(launch, "_exchange_device", exchange)
    monkeypatch.setattr(launch, "_restore_device", devices.append)
    launch.first(launch_of_nothing, (), 0, None, None)
    assert devices == ([0] if current == 0 else [0, 1])
    devices.clear()

    def fail() -> Prepared:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        launch.first(fail, (), 0, None, None)
    assert devices == ([0] if current == 0 else [0, 1])


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_sees_one_gpu_does_not_ask_which_is_current(
    launch: ModuleType, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange := lambda device: 0)
    again = importlib.util.module_from_spec(launch.__spec__)
    launch.__spec__.loader.exec_module(again)
    assert (again._exchange_device is exchange) == (count == 2)
    assert again._exchange_device(0) == 0


def launch_of_nothing() -> Prepared:
    return Prepared(KernelSpec("tiny", (), 128, 100_000), 1, ParamBlock(16), ParamStruct("Nothing"))


def in_a_thread(function: Any, *arguments: Any) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_tensor_maps_are_encoded_in_a_context(launch: ModuleType, fake: StrictDriver) -> None:
    def prepare(*_: object) -> Any:
        assert fake._current() == 100, "cuTensorMapEncodeTiled needs one"
        return launch_of_nothing()

    in_a_thread(launch.first, prepare, (), 0, None, None)
    assert len(fake.launches) == 1


def test_a_repeated_launch_of_a_new_thread_finds_its_context(launch: ModuleType, fake: StrictDriver) -> None:
    call: Call = ("op", 1), (torch.zeros(1),)
    launch.first(lambda *_: launch_of_nothing(), (), 0, call, launch.form_of(call))

    def again() -> None:
        assert launch.repeat(call)
        assert fake._current() == 100

    in_a_thread(again)
    assert len(fake.launches) == 2


def test_the_context_is_that_of_the_tensors_device(fake: StrictDriver) -> None:
    kernel = driver.load(_ARTIFACT, 100_000, 128)

    def run() -> None:
        kernel.launch(1, 0, ParamBlock(16), 1)
        assert fake._current() == 101

    in_a_thread(run)
    in_a_thread(lambda: driver.ensure_context(1) and fake.cuCtxGetDevice()[1] == 1)


def test_the_first_use_on_a_second_device_fails_no_launch(launch: ModuleType, fake: StrictDriver) -> None:
    fake.cuCtxSetCurrent(101)
    launch.first(lambda *_: launch_of_nothing(), (), 1, None, None)
    assert (fake.failed, len(fake.launches)) == (0, 1), "inside a capture a failed launch ends it"
    assert fake.smem_limits == {0: 100_000, 1: 100_000}


def test_an_entry_of_many_kernels_drops_several_others(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_MAX_KERNELS", 8)
    memory = launch._Memory(lambda kernels: kernels)
    for number in range(8):
        memory.put(("one", number), 1)
    memory.put(("many",), 5)
    assert list(memory.values()) == [1, 1, 1, 5]


class Watched(torch.Tensor):
    """A subclass that records the ops that it is an operand of."""

    seen: tuple[str, ...] = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        cls.seen += (func._schema.name,)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """CPU tensors claim to be on a GPU; returns the calls that bypass torch's dispatcher."""
    calls: list[Call] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    launch = SimpleNamespace(repeat=lambda call: calls.append(call) or True)
    monkeypatch.setattr(registry, "launcher", lambda: launch)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("argument", range(5))
def test_a_subclass_goes_through_the_dispatcher_whichever_operand_it_is(
    eager: list[Call], argument: int
) -> None:
    case = cases.dense_case(3, 64, 256)
    operands = [case.a, case.a_scale, case.b, case.b_scale, case.poisoned()]
    gemm = registry.OPS["gemm_fp8"].call
    gemm(*operands, None, False, False)
    gemm(*[torch.nn.Parameter(operand, requires_grad=False) for operand in operands], None, False, False)
    assert len(eager) == 2, "parameters are plain tensors"
    operands[argument] = torch.Tensor._make_subclass(Watched, operands[argument])
    Watched.seen = ()
    gemm(*operands, None, False, False)
    assert Watched.seen == ("moe_fp8::gemm_fp8",)
    assert len(eager) == 2


@torch.no_grad()
def test_a_fake_tensor_is_never_launched(eager: list[Call]) -> None:
    case = cases.dense_case(3, 64, 256)
    with FakeTensorMode(allow_non_fake_inputs=True):
        b = torch.empty(64, 256, dtype=torch.float8_e4m3fn)
    registry.OPS["gemm_fp8"].call(case.a, case.a_scale, b, case.b_scale, case.poisoned(), None, False, False)
    assert eager == []


@torch.no_grad()
def test_observers_of_the_dispatcher_and_gradients_need_it(
    eager: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = (torch.zeros(1),)
    assert registry.past_dispatcher(tensors)
    with torch.enable_grad():
        assert not registry.past_dispatcher(tensors)
    with FlopCounterMode(display=False):
        assert not registry.past_dispatcher(tensors)
    for variable in ("MOE_FP8_DISPATCH", "MOE_FP8_CHECKED"):
        monkeypatch.setattr(registry, "settings", lambda name=variable: parse_settings({name: "1"}))
        assert not registry.past_dispatcher(tensors)


@torch.no_grad()
def test_an_active_profiler_sees_the_ops(eager: list[Call]) -> None:
    case = cases.dense_case(3, 64, 256)
    arguments = case.a, case.a_scale, case.b, case.b_scale, case.poisoned(), None, False, False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        registry.OPS["gemm_fp8"].call(*arguments)
    assert "moe_fp8::gemm_fp8" in {event.key for event in profile.key_averages()}
