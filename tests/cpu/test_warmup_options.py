"""A plan made with an option holds the kernel of every call that the option allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fp8.errors import ConfigError, ModelError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.problems import (
    GemmLayout,
    GemmProblem,
    IndexerTopkProblem,
    KGroupedGemmProblem,
    MqaLogitsProblem,
    OutDtype,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
)
from moe_fp8.specs import kernel_spec
from moe_fp8.warmup import (
    GemmShape,
    Parallelism,
    PlanOptions,
    describe,
    gemm_shapes,
    load_model,
    parse_shape,
    plan,
    read_config,
    unplanned,
)

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = {name: load_model(CONFIGS / f"{name}.json") for name in ("deepseek_v32", "glm_45", "qwen3_30b")}
GROUPED: tuple[GemmLayout, ...] = ("m_indices", "psum", "offsets", "masked")


@st.composite
def options(draw: st.DrawFn) -> PlanOptions:
    tp, ep = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 8)]))
    redundant = draw(st.sampled_from([0, ep, 2 * ep]))
    budgets = st.sampled_from([132, 131, 112, 78])
    return PlanOptions(
        tp=tp,
        ep=ep,
        shared_tp=draw(st.sampled_from([None, 1])),
        redundant_experts=redundant,
        fuse_shared=draw(st.booleans()),
        max_tokens=draw(st.integers(1, 300)),
        max_batch=draw(st.integers(1, 40)),
        next_n=draw(st.integers(1, 4) | st.sampled_from([(1, 4), (2,)])),
        num_sms=tuple(draw(st.lists(budgets, min_size=1, max_size=2, unique=True))),
        block_size=tuple(draw(st.lists(st.sampled_from([32, 64, 128]), min_size=1, max_size=2, unique=True))),
        out_dtypes=tuple(
            cast(
                "list[OutDtype]",
                draw(st.lists(st.sampled_from(["bfloat16", "float32"]), min_size=1, max_size=2, unique=True)),
            )
        ),
        batch_invariant=draw(st.sampled_from([False, True, (False, True)])),
        weight_gradients=draw(st.booleans()),
    )


def chosen(draw: st.DrawFn, value: Any) -> Any:
    """One of an option's values."""
    return draw(st.sampled_from(value)) if isinstance(value, tuple) else value


def any_calls(name: str, used: PlanOptions, draw: st.DrawFn) -> Iterator[Problem]:
    """Calls of a server with these options; sizes are computed from the config and not by the planner."""
    config = read_config(CONFIGS / f"{name}.json")
    experts = config.get("n_routed_experts") or config["num_experts"]
    top = config["num_experts_per_tok"]
    shared = config.get("n_shared_experts", 0) if used.fuse_shared else 0
    local = (experts + used.redundant_experts) // used.ep + shared
    next_n = draw(
        st.sampled_from(used.next_n if isinstance(used.next_n, tuple) else range(1, used.next_n + 1))
    )
    batch = draw(st.integers(1, used.max_batch))
    sms, invariant = chosen(draw, used.num_sms), chosen(draw, used.batch_invariant)
    dtype, device = chosen(draw, used.out_dtypes), draw(st.sampled_from(gemm_table.devices()))
    tokens = draw(st.integers(1, max(used.max_tokens, used.max_batch * next_n)))
    groups = max(1, used.ep // used.tp)
    hidden, width = config["hidden_size"], config["moe_intermediate_size"] // max(1, used.tp // used.ep)
    n, k = draw(st.sampled_from([(2 * width, hidden), (hidden, width)]))
    layout = draw(st.sampled_from(GROUPED))
    m = batch * next_n * groups
    if layout != "masked":
        m = tokens * groups * (top + shared) + local * draw(st.integers(0, 127))
    hint = draw(st.none() | st.integers(-5, 2 * m))
    server: dict[str, Any] = {"num_sms": sms, "device": device, "batch_invariant": invariant}
    if width % 128 == 0:
        yield GemmProblem(layout, m, n, k, local, hint, dtype, **server)
        if used.weight_gradients:
            most = tokens * groups * (top + shared) + 127 * local
            yield KGroupedGemmProblem(n, k, draw(st.integers(1, most)), local, draw(st.booleans()), sms)
            # One expert alone, which gets the tokens of all ranks at most.
            own = draw(st.integers(1, tokens * groups))
            yield KGroupedGemmProblem(n, k, own + -own % 128, 1, draw(st.booleans()), sms)
    if shared == 0 and config.get("n_shared_experts"):
        cut = 1 if used.shared_tp else used.tp
        part = config["moe_intermediate_size"] * config["n_shared_experts"] // cut
        # Replicated shared experts get the tokens of one rank.
        yield GemmProblem("dense", tokens, 2 * part, hidden, 1, None, dtype, **server)
        if used.weight_gradients:
            accumulate = dtype == "float32" and draw(st.booleans())
            yield KGroupedGemmProblem(2 * part, hidden, tokens, 1, accumulate, sms, dtype)
    yield QuantizeProblem(tokens, hidden, "bfloat16", draw(st.booleans()), sms)
    if "index_n_heads" in config:
        heads, dim, page = config["index_n_heads"], config["index_head_dim"], chosen(draw, used.block_size)
        yield PagedMqaLogitsProblem(batch, next_n, heads, dim, page, sms)
        yield PagedMqaMetadataProblem(batch, next_n, sms)
        forms = draw(st.booleans()), draw(st.booleans())
        yield MqaLogitsProblem(
            tokens, draw(st.integers(1, 10**6)), heads, dim, *forms, sms, "float32", invariant
        )
        yield IndexerTopkProblem(tokens, draw(st.integers(1, 10**5)), "float32", sms)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), used=options(), data=st.data())
def test_no_call_misses(name: str, used: PlanOptions, data: st.DataObject) -> None:
    if not MODELS[name].num_shared_experts:
        used = replace(used, fuse_shared=False)
    planned = plan(MODELS[name], used)
    for _ in range(20):
        for problem in any_calls(name, used, data.draw):
            assert kernel_spec(problem) in planned, problem


def test_every_linear_layer_is_planned_or_listed() -> None:
    for model in MODELS.values():
        listed = {layer.what for layer in unplanned(model, Parallelism())}
        assert {shape.what for shape in gemm_shapes(model, Parallelism())} | listed == {
            linear.what for linear in model.linears
        }


def test_attention_is_cut_apart_from_mlps() -> None:
    """With data-parallel attention on eight ranks, each has all heads, and an eighth of MLPs and experts."""
    dp_attention = Parallelism(tp=8, ep=8, attention_tp=1, shared_tp=1)
    found = {shape.what: shape for shape in gemm_shapes(MODELS["deepseek_v32"], dp_attention)}
    assert found["q_b"].n == 128 * 192 and found["o"].k == 128 * 128
    assert found["mlp.down"].k == 18432 // 8 and found["shared.down"].k == 2048
    assert (found["experts.down"].num_experts, found["experts.down"].k) == (32, 2048)
    assert dp_attention.dp == 8
    whole = {s.what: s for s in gemm_shapes(MODELS["deepseek_v32"], Parallelism(tp=8, ep=8, mlp_tp=1))}
    assert (whole["mlp.down"].k, whole["shared.down"].k) == (18432, 2048)
    # The experts' ranks take the tokens of all eight, and so do the dense MLPs.
    rows = plan(MODELS["deepseek_v32"], PlanOptions(tp=8, ep=8, attention_tp=1, max_tokens=1000)).rows
    assert (
        max(last for row in rows if row.layout == "dense" and row.k == 2304 for _, last in row.rows) == 8000
    )


def test_shared_experts_that_more_ranks_split_than_attention_get_the_tokens_of_all() -> None:
    options = PlanOptions(tp=8, ep=8, attention_tp=1, mlp_tp=1, shared_tp=8, max_tokens=100, max_batch=1)
    rows = [row for row in plan(MODELS["deepseek_v32"], options).rows if "shared.gate_up" in row.what]
    assert max(last for row in rows if row.layout == "dense" for _, last in row.rows) == 800


def test_masked_rows_that_are_given_count() -> None:
    for engine in (None, "vllm"):
        options = PlanOptions(ep=8, max_tokens=8, max_batch=1, masked_rows=4096, engine=engine)
        rows = [row for row in plan(MODELS["qwen3_30b"], options).rows if row.layout == "masked"]
        assert max(last for row in rows for _, last in row.rows) == 4096


def test_moe_tensor_parallelism_on_its_own() -> None:
    found = {shape.what: shape for shape in gemm_shapes(MODELS["deepseek_v32"], Parallelism(1, 1, moe_tp=8))}
    assert (found["experts.down"].k, found["experts.down"].num_experts) == (256, 256)
    assert Parallelism(1, 1, moe_tp=8).dp == 8


def test_redundant_and_fused_experts_are_local() -> None:
    many = Parallelism(8, 8, redundant_experts=32)
    found = {shape.what: shape for shape in gemm_shapes(MODELS["deepseek_v32"], many)}
    assert found["experts.down"].num_experts == 36
    fused = {s.what: s for s in gemm_shapes(MODELS["deepseek_v32"], Parallelism(8, 1, fuse_shared=True))}
    assert fused["experts.down"].num_experts == 257 and "shared.down" not in fused


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("qwen3_30b", {}, "a model without any"),
        ("deepseek_v32", {"n_shared_experts": 0}, "a model without any"),
        ("qwen3_next_80b", {"shared_expert_intermediate_size": 5632}, r"as wide as 1 .*\(512\), got 5632"),
        ("deepseek_v32", {"quantization_config": ["mlp.shared_experts"]}, "shared experts in FP8"),
        (
            "deepseek_v32",
            {"quantization_config": ["model.layers.9.mlp.shared_experts"]},
            "in the same layers",
        ),
        ("deepseek_v4_flash", {}, "like the routed experts"),
    ],
)
def test_shared_experts_that_cannot_be_fused_are_refused(
    name: str, changes: dict[str, Any], why: str
) -> None:
    config = read_config(CONFIGS / f"{name}.json")
    if "quantization_config" in changes:
        skipped = {"modules_to_not_convert": changes["quantization_config"]}
        changes = {"quantization_config": config["quantization_config"] | skipped}
    model = describe(config | changes)
    plan(model, PlanOptions(max_tokens=8, max_batch=1))
    with pytest.raises(ConfigError, match=why) as caught:
        plan(model, PlanOptions(max_tokens=8, max_batch=1, fuse_shared=True))
    assert caught.value.field == "fuse_shared" and "--fuse-shared" in caught.value.remedy


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("ep", {"tp": 8, "ep": 3}),
        ("ep", {"ep": 8, "redundant_experts": 3}),
        ("attention_tp", {"tp": 8, "attention_tp": 3}),
        ("attention_tp", {"tp": 8, "ep": 8, "attention_tp": 48, "moe_tp": 6}),
        ("tp", {"tp": 48}),
        ("moe_tp", {"moe_tp": 0}),
        ("redundant_experts", {"redundant_experts": -1}),
        ("num_sms", {"num_sms": ()}),
        ("num_sms", {"num_sms": (132, 0)}),
        ("num_sms", {"num_sms": 2000}),
        ("num_sms", {"num_sms": tuple(range(100, 117))}),
        ("next_n", {"next_n": 9}),
        ("next_n", {"next_n": (1, 0)}),
        ("block_size", {"block_size": 16}),
        ("out_dtypes", {"out_dtypes": ("int8",)}),
        ("out_dtypes", {"out_dtypes": ()}),
        ("max_tokens", {"max_tokens": 2**31}),
        ("engine", {"engine": "tgi"}),
        ("engine", {"engine": ["vllm"]}),
        ("tp", {"tp": True}),
        ("num_sms", {"num_sms": []}),
        ("num_sms", {"num_sms": ([132, 112],)}),
        ("num_sms", {"num_sms": ({132: 112},)}),
        ("num_sms", {"num_sms": ({132, 112},)}),
        ("num_sms", {"num_sms": "132"}),
        ("next_n", {"next_n": [1, 9]}),
        ("next_n", {"next_n": (1, "2")}),
        ("block_size", {"block_size": [48]}),
        ("block_size", {"block_size": 64.0}),
        ("block_size", {"block_size": (None,)}),
        ("next_n", {"next_n": None}),
        ("max_tokens", {"max_tokens": "8"}),
        ("max_tokens", {"max_tokens": None}),
        ("max_batch", {"max_batch": 1.5}),
        ("masked_rows", {"masked_rows": True}),
        ("redundant_experts", {"redundant_experts": "1"}),
        ("out_dtypes", {"out_dtypes": 16}),
        ("batch_invariant", {"batch_invariant": "off"}),
        ("batch_invariant", {"batch_invariant": [1]}),
        ("fuse_shared", {"fuse_shared": "no"}),
        ("pad_intermediate", {"pad_intermediate": 1}),
        ("weight_gradients", {"weight_gradients": None}),
    ],
)
def test_bad_options_name_the_field(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(MODELS["deepseek_v32"], PlanOptions(**given))
    assert caught.value.field == field


def test_lists_are_as_good_as_tuples() -> None:
    """As JSON and YAML have them."""
    given = {
        "num_sms": [132, 112], "next_n": [1, 2], "block_size": [64], "batch_invariant": [True],
        "out_dtypes": ["bfloat16", "float32"],
    }  # fmt: skip
    options = PlanOptions(**given)  # type: ignore[arg-type]
    assert options == PlanOptions(**{name: tuple(value) for name, value in given.items()})  # type: ignore[arg-type]
    assert hash(options)


def test_too_many_numbers_of_sms_are_refused_with_the_reason() -> None:
    assert len(PlanOptions(num_sms=(*range(117, 133), 132)).sm_budgets) == 16
    with pytest.raises(ConfigError, match=r"at most 16 numbers, got 17; the plan tries every call"):
        PlanOptions(num_sms=tuple(range(116, 133)))


def test_engines_plan_only_what_they_call() -> None:
    everything = plan(MODELS["deepseek_v32"], PlanOptions(tp=8, ep=8, max_tokens=256))
    for engine, layouts in (("vllm", {"m_indices", "psum", "offsets"}), ("sglang", {"m_indices"})):
        planned = plan(MODELS["deepseek_v32"], PlanOptions(tp=8, ep=8, max_tokens=256, engine=engine))
        assert {row.layout for row in planned.rows if row.layout} == {"dense", "masked", *layouts}
        assert not {"indexer_topk", "indexer_quantize_and_cache"} & {row.op for row in planned.rows}
        assert {row.op for row in planned.rows} >= {"mqa_logits_fp8", "paged_mqa_logits_fp8"}
    vllm = plan(MODELS["deepseek_v32"], PlanOptions(tp=8, ep=8, max_tokens=256, engine="vllm"))
    assert set(vllm.specs) <= set(everything.specs)
    own = {"quantize_fp8", "silu_mul_quantize", "moe_permute", "moe_combine"}
    assert own < {row.op for row in vllm.rows} and not own & {row.op for row in planned.rows}
    assert "indexer.wk" in {layer.what for layer in vllm.unplanned}
    assert not any(layer.lacking for layer in vllm.unplanned)


def test_weight_gradients_are_planned_where_they_are_asked_for() -> None:
    extra = [parse_shape("dense:1024:2048")]
    for engine in (None, "sglang"):
        usual, trained = (
            plan(MODELS["deepseek_v32"], PlanOptions(tp=8, ep=8, engine=engine, **more), extra=extra)
            for more in ({}, {"weight_gradients": True})
        )
        rows = [row for row in trained.rows if row not in usual.rows]
        assert set(usual.rows) == set(trained.rows) - set(rows)
        assert {row.op for row in rows} == {"k_grouped_gemm_fp8", "gemm_fp8"}
        assert not any(row.op == "k_grouped_gemm_fp8" for row in usual.rows)
        shapes = {(row.n, row.k, row.num_experts) for row in rows}
        assert shapes == {
            (row.n, row.k, row.num_experts) for row in usual.rows if row.layout in ("dense", "masked")
        }
        for row in rows:
            experts = row.num_experts or 1
            bf16 = row.op == "gemm_fp8"
            problems = [
                KGroupedGemmProblem(row.n or 0, row.k or 0, mean * experts, experts, accumulate)
                for mean in row.rows[0]
                for accumulate in (False, not bf16)
            ]
            if bf16:
                problems = [replace(problem, out_dtype="bfloat16") for problem in problems]
            assert row.spec in map(kernel_spec, problems) and "block_m=128" in row.config


@pytest.mark.parametrize(("ranks", "most"), [({"ep": 8, "max_tokens": 1024}, 8192), ({"max_tokens": 3}, 128)])
def test_the_weight_gradient_of_each_expert_alone_is_planned(ranks: dict[str, Any], most: int) -> None:
    """An expert may get every token of all ranks, and its columns are whole scale blocks."""
    model = load_model(CONFIGS / "deepseek_v3.json")
    options = PlanOptions(**ranks, max_batch=1, weight_gradients=True)
    planned = plan(model, options)
    shapes = [shape for shape in gemm_shapes(model, options) if shape.num_experts]
    for shape in shapes:
        for columns in range(128, most + 1, 128):
            for accumulate, dtype in ((False, "float32"), (True, "float32"), (False, "bfloat16")):
                problem = KGroupedGemmProblem(shape.n, shape.k, columns, 1, accumulate, out_dtype=dtype)
                assert kernel_spec(problem) in planned, problem


def test_extra_gemms_are_in_the_plan() -> None:
    extra = [parse_shape("dense:1024:2048"), parse_shape("psum:512:1024:7")]
    planned = plan(MODELS["qwen3_30b"], PlanOptions(max_tokens=8, max_batch=1), extra=extra)
    assert {(row.n, row.k, row.num_experts) for row in planned.rows if "extra" in row.what} == {
        (1024, 2048, None),
        (512, 1024, 7),
        (None, 2048, None),
        (None, 1024, None),
    }


def test_a_dense_gemm_may_be_said_to_have_one_expert() -> None:
    for text in ("dense:1024:2048", "dense:1024:2048:1"):
        assert parse_shape(text) == GemmShape("extra", 1024, 2048)


@pytest.mark.parametrize(
    "text",
    [
        "dense", "dense:1024", "dense:1024:2048:2", "psum:1024:2048", "masked:1024:2048:8:1",
        "rows:1024:2048", "dense:-128:2048", "dense:1024:", "dense:²:2048", "dense:١٢٨:2048",
        "dense:1280000000000:2048",
    ],
)  # fmt: skip
def test_text_that_is_no_gemm_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gemm: expected layout:n:k:experts") as caught:
        parse_shape(text, "--gemm")
    assert caught.value.got == text


@pytest.mark.parametrize(
    ("n", "k", "experts"), [(100, 128, None), (128, 0, 4), (128, 128, 0), (128, 128, 1025)]
)
def test_extra_gemms_that_no_kernel_serves_are_refused(n: int, k: int, experts: int | None) -> None:
    with pytest.raises(ConfigError, match="extra"):
        plan(MODELS["qwen3_30b"], PlanOptions(), extra=[GemmShape("mine", n, k, experts)])


def test_an_indexer_that_no_kernel_serves_is_listed() -> None:
    config = read_config(CONFIGS / "deepseek_v32.json") | {"index_n_heads": 24}
    planned = plan(describe(config), PlanOptions(max_tokens=8, max_batch=1))
    assert not any("mqa" in row.op for row in planned.rows)
    (layer,) = (layer for layer in planned.lacking if "indexer" in layer.what)
    assert "got 24" in layer.reason
    with pytest.raises(ModelError, match="strict"):
        plan(describe(config), PlanOptions(max_tokens=8, max_batch=1), strict=True)


def test_any_number_of_requests_costs_no_more() -> None:
    planned = plan(MODELS["deepseek_v32"], PlanOptions(tp=8, ep=8, max_batch=2_000_000))
    schedules = [row for row in planned.rows if row.op == "paged_mqa_logits_metadata"]
    assert max(last for row in schedules for _, last in row.rows) == 2_000_000


def test_the_tokens_of_a_request_come_in_any_order() -> None:
    assert PlanOptions(max_batch=10, next_n=(1, 4, 2)).most_decoded == 40


@pytest.mark.parametrize("name", ["mlp_tp", "shared_tp"])
def test_layers_are_divided_among_ranks_that_exist(name: str) -> None:
    for ways in (16, 3):
        with pytest.raises(ConfigError, match=rf"{name}: .*the ranks that share the experts \(8\)"):
            Parallelism(8, 8, **{name: ways})
    assert Parallelism(8, 8, **{name: 4}).ways("shared") == 4
    assert Parallelism(8, 4, attention_tp=1, moe_tp=1).ways("mlp") == 8  # what was not given is not refused


def test_a_plan_takes_a_description_and_options() -> None:
    config = Path(__file__).parent.parent / "configs" / "qwen3_30b.json"
    with pytest.raises(ConfigError, match="model: expected a description, as load_model gives it"):
        plan(config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="options: expected PlanOptions, or None, got 'dict'"):
        plan(load_model(config), {})  # type: ignore[arg-type]
    for name in ("tp", "ep"):
        with pytest.raises(ConfigError, match=f"{name}: expected an integer"):
            PlanOptions(**{name: None})
