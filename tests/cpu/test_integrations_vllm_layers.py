"""The plug-in for vLLM: its linear layers, its experts, and the plan of a loaded model."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fp8 import gemm_fp8, moe_workspace_bytes, quantize_fp8, silu_mul_quantize, to_mn_major
from moe_fp8.integrations import planning
from moe_fp8.integrations import vllm as plug_in
from moe_fp8.limits import MAX_EXPERTS
from moe_fp8.problems import PagedMqaLogitsProblem
from moe_fp8.specs import kernel_spec
from moe_fp8.warmup.models import Indexer
from tests import cases
from tests.cpu.vllm_stand_in import (
    BlockScaledKernel,
    DeepGemmExperts,
    DeepGemmKernel,
    Fake,
    exchange,
    layer,
    module,
    vllm,
)

__all__ = ["vllm"]


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

    for right in (config(), config(n=192)):
        assert kernel.can_implement(right) == (True, None)
    for wrong in (config(n=100), config(k=200), config(k=192), config(out=torch.float16),
                  config(group=64), config(given=torch.float16), config(block=64)):  # fmt: skip
        possible, reason = kernel.can_implement(wrong)
        assert not possible and reason
    # Ours does not ask vLLM's kernel of DeepGEMM.
    monkeypatch.setattr(
        DeepGemmKernel, "can_implement", lambda config: (False, "no deep_gemm"), raising=False
    )
    assert kernel.can_implement(config()) == (True, None)
    monkeypatch.setattr(BlockScaledKernel, "can_implement", lambda config: (False, "vLLM's reason"))
    assert kernel.can_implement(config()) == (False, "vLLM's reason")


@pytest.mark.parametrize("rounded", [True, False])
def test_the_linear_kernel_rounds_scales_as_vllm_does(
    rounded: bool, vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in.activate(["dense"])
    from moe_fp8.integrations.vllm import linear

    given: list[Any] = []
    monkeypatch.setattr(linear, "linear_fp8", lambda *tensors, **options: given.append((tensors, options)))
    kernel = vllm.kernels[0]()
    kernel.use_deep_gemm_e8m0 = rounded
    x, weight, placeholder, scale = (torch.zeros(1) for _ in range(4))
    kernel.apply_block_scaled_mm(x, weight, placeholder, scale)
    ((tensors, options),) = given
    assert all(one is other for one, other in zip(tensors, (x, weight, scale), strict=True))
    assert options == {"power_of_two": rounded, "constant_weights": True}
    assert not kernel.apply_input_quant, "vLLM would quantize the input before"


def loaded_model(vllm: Fake) -> torch.nn.Module:
    """Layers as vLLM leaves them behind, where no kernel has been told of loaded weights."""
    kernel, other = vllm.kernels[0](), DeepGemmKernel()
    flashinfer = SimpleNamespace(fallback=DeepGemmKernel())
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
        # vLLM's own kernels of `deep_gemm` call our module.
        layer({"weight": (512, 7168)}, quant_method=holder(fp8_linear=other)),
        layer({"weight": (256, 7168)}, quant_method=holder(fp8_linear=flashinfer)),
        layer({"weight": (100, 7168)}, quant_method=holder(fp8_linear=other)),
        layer({"weight": (128, 7168)}, quant_method=holder(fp8_linear=BlockScaledKernel())),
        layer({"weight": (64, 1024, 4096)}, quant_method=holder(fp8_linear=kernel)),
        layer(experts, quant_method=holder(experts_cls=ours), moe_config=exchange(), top_k=8),
        # Its products are left to `deep_gemm`, which is ours.
        layer(
            {"w13_weight": (8, 512, 256), "w2_weight": (8, 256, 256)},
            quant_method=holder(experts_cls=type("BatchedDeepGemmExperts", (), {})),
            moe_config=exchange(8),
            top_k=4,
        ),
        layer({"w13_weight": (4, 256, 256), "w2_weight": (4, 256, 128)}, quant_method=holder()),
        layer(
            {"w13_weight": (2, 256, 256), "w2_weight": (2, 256, 128)},
            quant_method=holder(experts_cls=type("DeepGemmMegaExperts", (), {})),
        ).bfloat16(),
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
            data_parallel_size=4,
            prefill_context_parallel_size=1,
            enable_expert_parallel=True,
            use_ubatching=False,
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
    )
    model = vllm.loader().load_model(config, SimpleNamespace(max_model_len=4096, hf_text_config=text))
    assert model is vllm.loader.model
    vllm.own_loader().load_model(config, SimpleNamespace(max_model_len=4096, hf_text_config=pooled))
    loaded, other = warmed
    assert (loaded.max_tokens, loaded.max_batch, loaded.next_n, loaded.data_parallel) == (8192, 64, 2, 4)
    assert loaded.dense == {(n, 7168) for n in (4096, 2048, 1024, 512, 256)}
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


@pytest.mark.parametrize("kind", ["dense", "experts", "indexer"])
def test_only_layers_of_the_kinds_that_we_serve_are_planned(
    kind: str, vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_fp8.integrations.vllm import model as models

    monkeypatch.setattr(models, "get_num_sms", lambda: 132)
    plug_in.activate(["dense", "experts"])
    model = loaded_model(vllm)
    plug_in.activate([kind])
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=None),
    )
    text = SimpleNamespace(index_topk=2048, index_n_heads=64, index_head_dim=128, index_kpool=None)
    sizes = SimpleNamespace(max_model_len=4096, hf_text_config=text)
    loaded = models.describe_loaded(model, config, sizes)
    assert (bool(loaded.dense), bool(loaded.experts), loaded.indexer is not None) == tuple(
        kind == each for each in ("dense", "experts", "indexer")
    )
    # What a config sets to None, it does not ask for.
    assert loaded.next_n == 1 and loaded.max_positions == 4096
    if loaded.indexer is not None:
        assert loaded.indexer == Indexer(64, 128, 2048)
        text.index_topk = None
        assert models.describe_loaded(model, config, sizes).indexer is None


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
        data_parallel_size=1, prefill_context_parallel_size=1, enable_expert_parallel=experts,
        use_ubatching=True, enable_dbo=True,
    )  # fmt: skip
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        parallel_config=parallel, speculative_config=None,
    )  # fmt: skip
    sizes = SimpleNamespace(max_model_len=64, hf_text_config=SimpleNamespace())
    loaded = models.describe_loaded(torch.nn.Linear(2, 2), config, sizes)
    assert loaded.num_sms == expected
    communicator.all2all_manager = None  # ranks that share experts without such a library
    assert models.describe_loaded(torch.nn.Linear(2, 2), config, sizes).num_sms == (132, 112)


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
    num_bytes = moe_workspace_bytes(
        num_tokens=tokens, topk=topk, num_experts=experts, hidden_size=hidden, intermediate_size=width
    )
    assert shapes == ((0,), (num_bytes // 2,), (tokens, hidden))
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
        ({"intermediate_size_per_partition": 192}, "128 divides"),
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
    asked: list[Any] = []
    refused = False, "vLLM's reason"
    monkeypatch.setattr(DeepGemmExperts, "is_supported_config", lambda *given: asked.append(given) or refused)
    assert cls.is_supported_config(cls, "layer", 2, 1, "tokens") == refused
    assert asked == [(cls, "layer", 2, 1, "tokens")]
    # The stand-in's formats: 2 are weights in blocks of 128 x 128, 1 are activations in groups of 128.
    assert cls._supports_quant_scheme(2, 1)
    assert cls._supports_activation("silu") and not cls._supports_activation("gelu")
    assert not cls._supports_quant_scheme(2, 2) and not cls._supports_quant_scheme(1, 1)


@pytest.mark.parametrize("rounded", [True, False])
def test_the_experts_round_scales_as_vllm_does(rounded: bool, vllm: Fake) -> None:
    vllm.wrapper.DeepGemmQuantScaleFMT.from_oracle = lambda: 1 if rounded else 0
    plug_in.activate(["experts"])
    made = vllm.oracle.backend_to_kernel_cls("triton")[0]("layer", "format")
    assert made.power_of_two == rounded
    assert (made.moe_config, made.quant_config) == ("layer", "format")


def test_the_experts_are_for_hopper(vllm: Fake) -> None:
    plug_in.activate(["experts"])
    cls = vllm.oracle.backend_to_kernel_cls("triton")[0]
    assert cls._supports_current_device()
    vllm.platform.is_device_capability = lambda capability: capability == 80
    assert not cls._supports_current_device()


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
    x, weights = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    layer.apply(x, x, x, x, weights, x, "silu", 2, None, None, None, x, x, None, on_input)
    ((tensors, options),) = given
    assert (tensors[2] is None) == on_input and tensors[1] is x
    assert on_input or tensors[2].dtype is torch.float32
    assert (options["limit"], options["power_of_two"], options["rounded"]) == (7.0, False, True)


def test_the_workspace_has_room_for_all_experts_of_a_rank(vllm: Fake) -> None:
    from moe_fp8.integrations.vllm.experts import MoeFp8Experts

    layer: Any = SimpleNamespace(moe_config=SimpleNamespace(num_local_experts=256))
    _, (count,), _ = MoeFp8Experts.workspace_shapes(layer, 100, 512, 384, 8)
    needed = moe_workspace_bytes(
        num_tokens=100, topk=8, num_experts=256, hidden_size=384, intermediate_size=256
    )
    assert needed <= 2 * count < needed + 2
