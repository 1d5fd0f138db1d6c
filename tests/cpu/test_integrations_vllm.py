"""The plug-in for vLLM: what it changes in vLLM's modules, and that it takes all of it back."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fp8 import __version__, gemm_fp8, jit, quantize_fp8, silu_mul_quantize, to_mn_major
from moe_fp8.errors import ConfigError, SettingError, UnsupportedError
from moe_fp8.integrations import installed, planning
from moe_fp8.integrations import vllm as plug_in
from moe_fp8.limits import MAX_EXPERTS
from moe_fp8.problems import PagedMqaLogitsProblem
from moe_fp8.settings import parse_settings
from moe_fp8.specs import kernel_spec
from tests import cases


def module(patch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    patch.setitem(sys.modules, name, made)
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            module(patch, parent, __path__=[])
        patch.setattr(sys.modules[parent], last, made, raising=False)
    return made


class _Base:
    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None


class _DeepGemm(_Base):
    use_deep_gemm_e8m0 = True


class DeepGemmExperts:
    @staticmethod
    def is_supported_config(cls: Any, *arguments: Any) -> tuple[bool, str | None]:
        return True, None


def _first_elements(workspace: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return workspace.flatten()[: math.prod(shape)].view(shape)


class Fake(SimpleNamespace):
    """vLLM's modules as far as the plug-in touches them."""

    envs: Any
    kernels: list[Any]
    named: dict[str, set[Any]]
    oracle: Any
    loader: Any
    own_loader: Any
    wrapper: Any
    platform: Any


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda capability: capability == 90)
    cuda = object()
    module(monkeypatch, "vllm.platforms", current_platform=platform, PlatformEnum=SimpleNamespace(CUDA=cuda))
    formats = SimpleNamespace(FLOAT32_CEIL_UE8M0=1, from_oracle=lambda: 1, _oracle_cache=3)
    wrapper = module(
        monkeypatch, "vllm.utils.deep_gemm", _fp8_gemm_nt_impl=print, DeepGemmQuantScaleFMT=formats,
        _paged_mqa_logits_schedule_slots=lambda num_sms, next_n: num_sms // 2,
    )  # fmt: skip
    module(monkeypatch, "vllm.utils.import_utils")
    envs = module(monkeypatch, "vllm.envs", VLLM_BATCH_INVARIANT=False, environment_variables={})
    kernels: list[Any] = [_DeepGemm]
    linear = "vllm.model_executor.kernels.linear"
    named: dict[str, set[Any]] = {"deep_gemm": {_DeepGemm}}
    module(
        monkeypatch, linear, _POSSIBLE_FP8_BLOCK_KERNELS={cuda: kernels},
        _LINEAR_BACKEND_KERNEL_MAP=named, __path__=[],
    )  # fmt: skip
    block = f"{linear}.scaled_mm.BlockScaledMMLinearKernel"
    module(monkeypatch, block, Fp8BlockScaledMMLinearKernel=_Base)
    module(monkeypatch, f"{linear}.scaled_mm.deep_gemm", DeepGemmFp8BlockScaledMMKernel=_DeepGemm)
    moe = "vllm.model_executor.layers.fused_moe"
    backends = SimpleNamespace(DEEPGEMM="deepgemm", TRITON="triton", MARLIN="marlin")
    oracle = module(
        monkeypatch, f"{moe}.oracle.fp8", Fp8MoeBackend=backends,
        backend_to_kernel_cls=lambda backend: [f"{backend} experts"],
    )  # fmt: skip
    module(monkeypatch, f"{moe}.activation", MoEActivation=SimpleNamespace(SILU="silu"))
    module(monkeypatch, f"{moe}.experts.deep_gemm_moe", DeepGemmExperts=DeepGemmExperts)
    module(monkeypatch, f"{moe}.utils", _resize_cache=_first_elements)
    quant = "vllm.model_executor.layers.quantization.utils.quant_utils"
    module(monkeypatch, quant, kFp8Dynamic128Sym=1, kFp8Static128BlockSym=2)

    class Loader:
        model = torch.nn.Linear(2, 2)

        def load_model(self, vllm_config: Any, model_config: Any) -> Any:
            return self.model

    class OwnLoader(Loader):
        def load_model(self, vllm_config: Any, model_config: Any) -> Any:
            return torch.nn.Linear(3, 3)

    module(monkeypatch, "vllm.model_executor.model_loader.base_loader", BaseModelLoader=Loader)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "relax")
    monkeypatch.delenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", raising=False)
    yield Fake(
        envs=envs, kernels=kernels, named=named, oracle=oracle, loader=Loader, own_loader=OwnLoader,
        wrapper=wrapper, platform=platform,
    )  # fmt: skip
    plug_in.deactivate()
    jit.unfreeze()
    for name in ("linear", "experts"):
        sys.modules.pop(f"moe_fp8.integrations.vllm.{name}", None)


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (None, ()),
        ("0", ()),
        ("1", ("dense", "experts", "indexer")),
        ("indexer,dense", ("dense", "indexer")),
    ],
)
def test_the_variable(value: str | None, kinds: tuple[str, ...]) -> None:
    given = {} if value is None else {"MOE_FP8_ENGINE": value}
    assert parse_settings(given).engine == kinds


@pytest.mark.parametrize("value", ["", "yes", "dense;experts", "moe"])
def test_a_bad_variable_is_an_error(value: str) -> None:
    with pytest.raises(SettingError, match="dense, experts, indexer"):
        parse_settings({"MOE_FP8_ENGINE": value})


def test_register_does_nothing_without_the_variable(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plug_in, "settings", lambda: parse_settings({}))
    plug_in.register()
    assert not plug_in.active() and vllm.kernels == [_DeepGemm] and installed() == ()


def test_register_changes_vllm_and_deactivate_restores_it(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vllm.oracle.backend_to_kernel_cls, vllm.loader.load_model, vllm.own_loader.load_model
    monkeypatch.setattr(plug_in, "settings", lambda: parse_settings({"MOE_FP8_ENGINE": "1"}))
    plug_in.register()
    plug_in.register()  # vLLM may call it again
    assert plug_in.active() and installed() == ("dense", "experts", "indexer")
    assert [kernel.__name__ for kernel in vllm.kernels] == ["MoeFp8LinearKernel", "_DeepGemm"]
    assert vllm.named["deep_gemm"] == set(vllm.kernels)  # --linear-backend deep_gemm
    for backend in ("deepgemm", "triton"):
        ours, theirs = vllm.oracle.backend_to_kernel_cls(backend)
        assert ours.__name__ == "MoeFp8Experts" and theirs == f"{backend} experts"
    assert vllm.oracle.backend_to_kernel_cls("marlin") == ["marlin experts"]
    assert vllm.wrapper._fp8_gemm_nt_impl is None and os.environ["VLLM_DEEP_GEMM_WARMUP"] == "skip"
    assert set(vllm.envs.environment_variables) == {"MOE_FP8_ENGINE"}
    # A compiled model of other kinds, or of another version, has another name.
    told = vllm.envs.environment_variables["MOE_FP8_ENGINE"]()
    assert told == f"dense,experts,indexer {__version__}"
    plug_in.deactivate()
    assert vllm.envs.environment_variables == {}
    assert not plug_in.active() and installed() == () and vllm.kernels == [_DeepGemm]
    assert vllm.named["deep_gemm"] == {_DeepGemm}
    after = vllm.oracle.backend_to_kernel_cls, vllm.loader.load_model, vllm.own_loader.load_model
    assert after == before
    assert os.environ["VLLM_DEEP_GEMM_WARMUP"] == "relax"


def test_some_kinds_leave_the_others_alone(vllm: Fake) -> None:
    plug_in.activate(["indexer"])
    assert vllm.kernels == [_DeepGemm] and vllm.oracle.backend_to_kernel_cls("deepgemm") == [
        "deepgemm experts"
    ]
    assert os.environ["VLLM_DEEP_GEMM_WARMUP"] == "relax"
    assert vllm.wrapper._paged_mqa_logits_schedule_slots(132, 4) == 132
    for kinds, warmup in ((["dense"], "relax"), (["experts"], "relax"), (["dense", "experts"], "skip")):
        plug_in.activate(kinds)
        assert os.environ["VLLM_DEEP_GEMM_WARMUP"] == warmup, "what we do not serve is warmed up"
    assert vllm.wrapper._paged_mqa_logits_schedule_slots(132, 4) == 66


def test_vllm_looks_names_up_again_behind_each_change(vllm: Fake) -> None:
    wrapper = vllm.wrapper
    wrapper.is_deep_gemm_supported = cache(lambda: installed())
    wrapper.is_deep_gemm_supported.__module__ = wrapper.__name__
    assert wrapper.is_deep_gemm_supported() == ()
    for change, kinds in ((lambda: plug_in.activate(["dense"]), ("dense",)), (plug_in.deactivate, ())):
        wrapper._fp8_gemm_nt_impl, wrapper.DeepGemmQuantScaleFMT._oracle_cache = print, 3
        change()
        assert wrapper._fp8_gemm_nt_impl is wrapper.DeepGemmQuantScaleFMT._oracle_cache is None
        assert wrapper.is_deep_gemm_supported() == kinds


def test_a_second_activation_replaces_the_first(vllm: Fake) -> None:
    plug_in.activate(["dense", "experts"])
    with pytest.raises(ConfigError, match="dens"):
        plug_in.activate(["dens"])
    assert installed() == ("dense", "experts") and len(vllm.kernels) == 2
    plug_in.activate(["dense"])
    assert installed() == ("dense",) and len(vllm.kernels) == 2
    assert vllm.oracle.backend_to_kernel_cls("triton") == ["triton experts"]
    plug_in.activate(["indexer"])
    assert vllm.kernels == [_DeepGemm]


@pytest.mark.parametrize(
    ("before", "during"),
    [
        (None, "MOE_FP8_"),
        ("", "MOE_FP8_"),
        ("MY_, OWN_", "MY_,OWN_,MOE_FP8_"),
        ("MY_,MOE_FP8_", "MY_,MOE_FP8_"),
    ],
)
def test_ray_workers_get_all_variables(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch, before: str | None, during: str
) -> None:
    prefixes = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    if before is not None:
        monkeypatch.setenv(prefixes, before)
    plug_in.activate(["indexer"])
    assert os.environ[prefixes] == during
    plug_in.deactivate()
    assert os.environ.get(prefixes) == before


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_experts_are_invariant_if_the_ops_are(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    plug_in.activate(["experts"])
    from moe_fp8.integrations.vllm import experts

    given = parse_settings({"MOE_FP8_BATCH_INVARIANT": value})
    monkeypatch.setattr(experts, "settings", lambda: given)
    assert experts.MoeFp8Experts._supports_batch_invariance() == (value == "1")


def test_batch_invariance_must_be_ours_too(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(SettingError, match="MOE_FP8_BATCH_INVARIANT"):
        plug_in.activate(["dense"])
    assert not plug_in.active() and vllm.kernels == [_DeepGemm]
    monkeypatch.setattr(plug_in, "settings", lambda: parse_settings({"MOE_FP8_BATCH_INVARIANT": "1"}))
    plug_in.activate(["dense"])
    assert plug_in.active()


def test_a_freeze_of_the_process_is_kept(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "load_plan", lambda plan: len(plan.specs))
    loaded = planning.LoadedEngine("vllm", "Model", max_tokens=8, max_batch=8, max_positions=64, num_sms=132)
    for kept in (True, False):
        if kept:
            jit.freeze("strict")
        undo: list[Any] = []
        planning.warm(loaded, undo)
        assert jit.is_frozen() and bool(undo) != kept
        for call in undo:
            call()
        assert jit.is_frozen() == kept
        jit.unfreeze()


def test_another_gpu_is_refused_before_any_change(vllm: Fake) -> None:
    vllm.platform.is_device_capability = lambda capability: False
    with pytest.raises(UnsupportedError, match="Hopper"):
        plug_in.activate(["dense"])
    assert not plug_in.active() and vllm.kernels == [_DeepGemm]


def test_a_failure_leaves_nothing_changed(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm.oracle, "backend_to_kernel_cls")
    with pytest.raises(AttributeError):
        plug_in.activate(["dense", "experts"])
    assert not plug_in.active() and vllm.kernels == [_DeepGemm] and installed() == ()


def test_the_linear_kernel_says_what_it_serves(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in.activate(["dense"])
    kernel = vllm.kernels[0]
    assert kernel.is_supported(90) == (True, None)
    assert not kernel.is_supported(100)[0] and not kernel.is_supported(None)[0]

    def config(
        n: int = 4096, k: int = 7168, out: torch.dtype = torch.bfloat16, group: int = 128,
        given: torch.dtype = torch.bfloat16, block: int = 128,
    ) -> Any:  # fmt: skip
        def scales(*shape: int) -> Any:
            return SimpleNamespace(scale=SimpleNamespace(group_shape=shape))

        return SimpleNamespace(
            out_dtype=out, input_dtype=given, weight_shape=(n, k),
            activation_quant_key=scales(1, group), weight_quant_key=scales(block, 128),
        )  # fmt: skip

    assert kernel.can_implement(config()) == (True, None)
    for wrong in (config(n=100), config(k=200), config(out=torch.float16), config(group=64),
                  config(given=torch.float16), config(block=64)):  # fmt: skip
        possible, reason = kernel.can_implement(wrong)
        assert not possible and reason
    monkeypatch.setattr(_Base, "can_implement", lambda config: (False, "vLLM's reason"))
    assert kernel.can_implement(config()) == (False, "vLLM's reason")


@pytest.mark.parametrize("rounded", [True, False])
def test_the_linear_kernel_rounds_scales_as_vllm_does(
    rounded: bool, vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in.activate(["dense"])
    from moe_fp8.integrations.vllm import linear

    given: list[Any] = []
    monkeypatch.setattr(linear, "linear_fp8", lambda *tensors, **options: given.append(options))
    kernel = vllm.kernels[0]()
    kernel.use_deep_gemm_e8m0 = rounded
    kernel.apply_block_scaled_mm(*[torch.zeros(1)] * 4)
    assert given == [{"power_of_two": rounded, "constant_weights": True}]


def layer(weights: dict[str, tuple[int, ...]], **attributes: Any) -> torch.nn.Module:
    """A layer with FP8 weights of these shapes."""
    made = torch.nn.Module()
    for name, shape in weights.items():
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        made.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    made.__dict__.update(attributes)
    return made


def loaded_model(vllm: Fake) -> torch.nn.Module:
    """Layers as vLLM leaves them behind, where no kernel has been told of loaded weights."""
    kernel, other = vllm.kernels[0](), _DeepGemm()
    holder = SimpleNamespace
    experts = {"w13_weight": (32, 4096, 7168), "w2_weight": (32, 7168, 2048)}
    ours = vllm.oracle.backend_to_kernel_cls("triton")[0]
    layers = [
        layer({"weight": (4096, 7168)}, quant_method=holder(fp8_linear=kernel)),
        layer({"weight": (1024, 7168)}, quant_method=holder(), scheme=holder(fp8_linear=kernel)),
        layer(
            {"weight": (2048, 7168)},
            quant_method=holder(scheme=holder(linear_method=holder(fp8_linear=kernel))),
        ),
        layer({"weight": (512, 7168)}, quant_method=holder(fp8_linear=other)),
        layer({"weight": (8, 1024, 4096)}, quant_method=holder(fp8_linear=kernel)),
        layer(experts, quant_method=holder(experts_cls=ours), top_k=8),
        # Its products are left to `deep_gemm`, which is ours.
        layer(
            {"w13_weight": (8, 512, 256), "w2_weight": (8, 256, 256)},
            quant_method=holder(experts_cls=type("BatchedDeepGemmExperts", (), {})),
            top_k=4,
        ),
        layer({"w13_weight": (4, 256, 256), "w2_weight": (4, 256, 128)}, quant_method=holder()),
    ]
    return torch.nn.Sequential(*layers)


def test_a_loaded_model_is_planned(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_fp8.integrations.vllm import model as models

    warmed: list[planning.LoadedEngine] = []
    monkeypatch.setattr(planning, "warm", lambda loaded, undo: warmed.append(loaded))
    monkeypatch.setattr(models, "get_num_sms", lambda: 132)
    plug_in.activate(["dense", "experts", "indexer"])
    monkeypatch.setattr(vllm.loader, "model", loaded_model(vllm))
    text = SimpleNamespace(index_topk=2048, index_n_heads=64, index_head_dim=128, kv_lora_rank=512)
    pooled = SimpleNamespace(index_topk=2048, index_n_heads=16, index_head_dim=128, index_kpool=4)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64),
        parallel_config=SimpleNamespace(
            data_parallel_size=4, enable_expert_parallel=True, use_ubatching=False
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
    )
    model = vllm.loader().load_model(config, SimpleNamespace(max_model_len=4096, hf_text_config=text))
    assert model is vllm.loader.model
    vllm.own_loader().load_model(config, SimpleNamespace(max_model_len=4096, hf_text_config=pooled))
    loaded, other = warmed
    assert (loaded.max_tokens, loaded.max_batch, loaded.next_n, loaded.data_parallel) == (8192, 64, 2, 4)
    assert loaded.dense == {(4096, 7168), (1024, 7168), (2048, 7168)}
    batched = {(8, 512, 256), (8, 256, 256)}
    assert loaded.experts == {(32, 4096, 7168), (32, 7168, 2048), *batched}
    assert loaded.experts_per_token == 8
    assert (loaded.kv_lora_rank, other.kv_lora_rank) == (512, None)
    assert not other.dense and not other.experts
    assert loaded.indexer is not None and loaded.indexer.num_heads == 64
    assert loaded.num_sms == (132,) and planning.plan_loaded(loaded).specs
    for described, heads, pages in ((loaded, 64, (64,)), (other, 32, (32, 64))):
        specs = set(planning.plan_loaded(described).specs)
        for page in (32, 64):
            problem = PagedMqaLogitsProblem(64, 1, heads, 128, page, 132, "float32")
            assert (kernel_spec(problem) in specs) == (page in pages)


@pytest.mark.parametrize(
    ("experts", "most", "expected"),
    [(False, 4, (132, 112)), (True, None, (132, 112)), (True, 0, (132, 132)), (True, 16, (132, 116))],
)
def test_overlapped_micro_batches_leave_sms_to_communication(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch, experts: bool, most: int | None, expected: tuple[int, ...]
) -> None:
    from moe_fp8.integrations.vllm import model as models

    monkeypatch.setattr(models, "get_num_sms", lambda: 132)
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_DBO_COMM_SMS", 20, raising=False)
    communicator = SimpleNamespace(all2all_manager=SimpleNamespace(max_sms_used=lambda: most))
    group = SimpleNamespace(device_communicator=communicator)
    module(monkeypatch, "vllm.distributed.parallel_state", get_ep_group=lambda: group)
    parallel = SimpleNamespace(
        data_parallel_size=1, enable_expert_parallel=experts, use_ubatching=True, enable_dbo=True
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        parallel_config=parallel, speculative_config=None,
    )  # fmt: skip
    sizes = SimpleNamespace(max_model_len=64, hf_text_config=SimpleNamespace())
    loaded = models.describe_loaded(torch.nn.Linear(2, 2), config, sizes)
    assert loaded.num_sms == expected


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_experts_compute_the_layer(ranks: int, quantized: bool, vllm: Fake) -> None:
    """Tokens through `apply`, against each expert alone; the workspaces begin as NaN."""
    plug_in.activate(["experts"])
    cls = vllm.oracle.backend_to_kernel_cls("triton")[0]
    tokens, topk, experts, hidden, width = 9, 2, 4, 256, 128
    gen = cases.generator(5, "cpu")
    w13, w13_scale = cases.weights(experts, 2 * width, hidden, gen)
    w2, w2_scale = cases.weights(experts, hidden, width, gen)
    x = torch.randn(tokens, hidden, generator=gen).bfloat16()
    ids = torch.rand(tokens, experts * ranks, generator=gen).topk(topk).indices
    weights = torch.rand(tokens, topk, generator=gen)
    numbers = None
    if ranks == 2:
        numbers = torch.full((2 * experts,), -1, dtype=torch.int32)
        numbers[1::2] = torch.arange(experts, dtype=torch.int32)
    layer = cls.__new__(cls)
    layer.moe_config = SimpleNamespace(num_local_experts=experts)
    layer.w1_scale, layer.w2_scale, layer.gemm1_clamp_limit = w13_scale, w2_scale, None
    layer.power_of_two = True
    values, scales = quantize_fp8(x, power_of_two=True)
    shapes = layer.workspace_shapes(tokens, 2 * width, hidden, topk, experts * ranks, experts, None, "silu")
    spaces = [torch.full(shape, float("nan"), dtype=torch.bfloat16) for shape in shapes]
    layer.apply(
        spaces[2], values if quantized else x, w13, w2, weights, ids, "silu", experts * ranks, numbers,
        scales if quantized else None, None, spaces[0], spaces[1], None, False,
    )  # fmt: skip
    expected = torch.zeros(tokens, hidden)
    for expert in range(experts):
        number = expert if numbers is None else int((numbers == expert).nonzero())
        for token, place in (ids == number).nonzero().tolist():
            row = slice(token, token + 1)
            first = gemm_fp8(values[row], to_mn_major(scales[row]), w13[expert], w13_scale[expert])
            second = gemm_fp8(
                *silu_mul_quantize(first, rounded=True, power_of_two=True), w2[expert], w2_scale[expert]
            )
            expected[token] += weights[token, place] * second[0].float()
    torch.testing.assert_close(spaces[2].float(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"swiglu_alpha": 1.0, "swiglu_beta": 0.0}, None),
        ({"swiglu_alpha": 1.702}, "alpha 1.702"),
        ({"swiglu_beta": 1.0}, "beta 1.0"),
        ({"hidden_dim": 2880}, "128 divides"),
        ({"has_bias": True}, "bias"),
        ({"num_local_experts": MAX_EXPERTS}, None),
        ({"num_local_experts": MAX_EXPERTS + 1}, f"experts, got {MAX_EXPERTS + 1}"),
        ({"in_dtype": torch.float16}, "bf16"),
    ],
)
def test_the_experts_refuse_layers_that_they_do_not_compute(
    changed: dict[str, Any], reason: str | None, vllm: Fake
) -> None:
    plug_in.activate(["experts"])
    cls = vllm.oracle.backend_to_kernel_cls("triton")[0]
    sizes = {"hidden_dim": 2048, "intermediate_size_per_partition": 768, "num_local_experts": 8}
    sizes["in_dtype"] = torch.bfloat16
    supported, why = cls.is_supported_config(cls, SimpleNamespace(**(sizes | changed)), None, None, None)
    assert supported == (reason is None) and (reason is None or reason in str(why))


def test_the_experts_refuse_what_vllms_refuse(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in.activate(["experts"])
    cls = vllm.oracle.backend_to_kernel_cls("triton")[0]
    monkeypatch.setattr(DeepGemmExperts, "is_supported_config", lambda *_: (False, "vLLM's reason"))
    assert cls.is_supported_config(cls, None, None, None, None) == (False, "vLLM's reason")
    # The stand-in's formats: 2 are weights in blocks of 128 x 128, 1 are activations in groups of 128.
    assert cls._supports_quant_scheme(2, 1)
    assert not cls._supports_quant_scheme(2, 2) and not cls._supports_quant_scheme(1, 1)


@pytest.mark.parametrize("on_input", [False, True])
def test_the_experts_pass_on_how_the_layer_computes(
    on_input: bool, vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router's weight that the engine has applied to the input is not applied again."""
    plug_in.activate(["experts"])
    from moe_fp8.integrations.vllm import experts

    given: list[Any] = []
    monkeypatch.setattr(experts, "fused_moe", lambda *tensors, **options: given.append((tensors, options)))
    layer = experts.MoeFp8Experts.__new__(experts.MoeFp8Experts)
    layer.w1_scale = layer.w2_scale = None
    layer.gemm1_clamp_limit, layer.power_of_two = 7.0, False
    layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_all2all_kernels=on_input))
    assert layer.expects_unquantized_inputs != on_input
    x = torch.ones(2, 2)
    layer.apply(x, x, x, x, x, x, "silu", 2, None, None, None, x, x, None, on_input)
    ((tensors, options),) = given
    assert (tensors[2] is None) == on_input and tensors[1] is x
    assert (options["limit"], options["power_of_two"], options["rounded"]) == (7.0, False, True)
