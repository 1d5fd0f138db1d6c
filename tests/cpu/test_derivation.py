"""The independent derivation of linear layers, against numbers that others counted or published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.derivation import Config, Linear, fp8_parameters, linears, parameters, pieces

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
RESTATED = [name.removesuffix("_transformers") for name in NAMES if name.endswith("_transformers")]

#: Attention tp, MLP tp, expert tp and ep.
RANKS = [(1, 1, 1, 1), (2, 2, 2, 1), (8, 8, 1, 8), (4, 4, 1, 16), (1, 1, 1, 8)]


def config_of(name: str) -> Config:
    config: Config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def of(config: Config, what: str, **ranks: int) -> set[tuple[int, int]]:
    return {(one.n, one.k) for one in linears(config, **ranks) if one.what == what}


def test_every_config_has_a_source() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    named = {name.strip() for row in rows for name in row.split(",")}
    assert {name.removesuffix("_transformers") for name in NAMES} <= named


@pytest.mark.parametrize("name", NAMES)
def test_every_config_gives_attention_and_experts(name: str) -> None:
    config = config_of(name)
    named = {one.what for one in linears(config)}
    assert {"router", "experts.gate_up", "experts.down", "lm_head"} <= named
    assert named & {"qkv", "qkv+index", "kv_b", "wq_b"}
    assert named & {"o", "wo_b"}


@pytest.mark.parametrize("name", RESTATED)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_both_spellings_give_the_same_layers(name: str, ranks: tuple[int, int, int, int]) -> None:
    """What transformers writes describes the same model as the hub's file."""
    ours, theirs = config_of(name), config_of(f"{name}_transformers")
    try:
        expected = linears(ours, *ranks)
    except ValueError:
        with pytest.raises(ValueError):
            linears(theirs, *ranks)
        return
    assert linears(theirs, *ranks) == expected
    assert len(pieces(theirs)) == len(pieces(ours))


#: Total sizes in billions: what the model's name or its card says, or what somebody counted in the files.
#: Cards leave out multi-token prediction, which we list where the config counts it: its size is added here.
SIZES = {
    "deepseek_v2": 236,
    "deepseek_v2_lite": 15.7,
    "deepseek_v3": 671 + 11.6,
    "kimi_k2": 1026.4,
    "glm_45": 355 + 3.6,
    "glm_45_air": 106 + 2.4,
    "glm_5": 753.86,
    "qwen3_30b": 30.53,
    "qwen3_235b": 235.1,
    "qwen3_next_80b": 79.7 + 1.6,
    "qwen35_397b": 397 + 6.5,
    "minimax_m2": 229,
    "longcat_flash": 560,
    "dots1": 142,
    "dots3_note": 280,
    "ernie_45_21b": 21.8,
    "ernie_45_300b": 299,
    "hunyuan_a13b": 80.4,
    "hy_v3": 295 + 3.8,
    "hy_v4": 770 + 10,
    "mimo_v2_flash": 309,
    "deepseek_v4_flash": 284 + 6.6,
    "gpt_oss_120b": 116.8,
}


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_parameters_is_known(name: str) -> None:
    assert parameters(config_of(name)) == pytest.approx(SIZES[name] * 1e9, rel=0.012)


def test_deepseek_v3_without_prediction_has_671_billion_parameters() -> None:
    config = {**config_of("deepseek_v3"), "num_nextn_predict_layers": 0}
    assert parameters(config) == pytest.approx(671.026e9, rel=1e-4)


def test_minimax_m3_without_prediction_has_the_counted_size() -> None:
    """427,040,140,160 values are in the files, 0.6 to 0.7 billion of them of the vision part."""
    config = config_of("minimax_m3")
    config["text_config"]["num_mtp_modules"] = 0
    assert 0.5e9 < 427_040_140_160 - parameters(config) < 0.9e9


def test_glm_53_flash_has_the_counted_elements() -> None:
    """The files have 314,396,639,232 FP8 elements. 321,322,735,872 are all, with 0.564 billion for vision."""
    config = config_of("glm_53_flash")
    assert fp8_parameters(config) == 314_396_639_232
    assert parameters(config) == pytest.approx(321.3227e9 - 0.564e9, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Shapes that engines are known to multiply.
        ("deepseek_v3", {"q_a+kv_a": (2112, 7168), "q_b": (24576, 1536), "kv_b": (32768, 512)}),
        ("deepseek_v3", {"o": (7168, 16384), "mlp.gate_up": (36864, 7168), "mlp.down": (7168, 18432)}),
        ("deepseek_v3", {"shared.gate_up": (4096, 7168), "shared.down": (7168, 2048), "router": (256, 7168)}),
        ("deepseek_v3", {"experts.gate_up": (4096, 7168), "experts.down": (7168, 2048)}),
        ("deepseek_v32", {"indexer.wq_b": (8192, 1536), "indexer.wk+weights_proj": (192, 7168)}),
        ("kimi_k2", {"q_b": (12288, 1536), "o": (7168, 8192), "router": (384, 7168)}),
        ("glm_5", {"q_a+kv_a": (2624, 6144), "q_b": (16384, 2048), "kv_b": (28672, 512), "o": (6144, 16384)}),
        ("glm_5", {"indexer.wq_b": (4096, 2048), "mlp.down": (6144, 12288)}),
        ("glm_45", {"qkv": (14336, 5120), "o": (5120, 12288), "experts.gate_up": (3072, 5120)}),
        ("qwen3_235b", {"qkv": (9216, 4096), "experts.down": (4096, 1536)}),
        ("qwen3_30b", {"qkv": (5120, 2048), "o": (2048, 4096), "experts.gate_up": (1536, 2048)}),
        # The modules that a dump of the loaded model shows.
        ("qwen3_next_80b", {"in_proj_qkvz": (12288, 2048), "in_proj_ba": (64, 2048), "qkv": (9216, 2048)}),
        ("qwen3_next_80b", {"out_proj": (2048, 4096), "o": (2048, 4096), "shared.gate": (1, 2048)}),
        # The released configs of DeepSeek-V4.
        ("deepseek_v4_flash", {"wq_a+wkv": (1536, 4096), "wq_b": (32768, 1024), "wo_b": (4096, 8192)}),
        ("deepseek_v4_flash", {"wo_a": (1024, 4096), "indexer.wq_b": (8192, 1024)}),
        ("deepseek_v4_pro", {"wq_a+wkv": (2048, 7168), "wq_b": (65536, 1536), "wo_b": (7168, 16384)}),
    ],
)  # fmt: skip
def test_known_shapes(name: str, expected: dict[str, tuple[int, int]]) -> None:
    config = config_of(name)
    for what, shape in expected.items():
        assert of(config, what) == {shape}, what


def test_known_shapes_of_one_rank() -> None:
    v4 = config_of("deepseek_v4_flash")
    assert of(v4, "shared.gate_up", mlp_tp=8) == {(512, 4096)}
    assert of(config_of("deepseek_v4_pro"), "shared.down", mlp_tp=8) == {(7168, 384)}
    assert of(config_of("deepseek_v3"), "q_b", attention_tp=8) == {(3072, 1536)}
    # Four key-value heads on eight ranks: each has one, with a copy on another rank.
    assert of(config_of("qwen3_235b"), "qkv", attention_tp=8) == {((8 + 2) * 128, 4096)}
    qwen = linears(config_of("qwen3_30b"), moe_tp=4, ep=2)
    assert Linear("experts.gate_up", 384, 2048, 64, True) in qwen


def test_layers_of_one_model_differ() -> None:
    """Full and sliding layers of MiMo-V2-Flash and dots3 have different heads; MiMo's values are narrower."""
    assert of(config_of("mimo_v2_flash"), "qkv") == {(64 * 192 + 4 * 320, 4096), (64 * 192 + 8 * 320, 4096)}
    dots = config_of("dots3_note")
    assert of(dots, "q_a+kv_a") == {(1024 + 576, 5120), (1024 + 1088, 5120)}
    assert of(dots, "gate") == {(128, 5120), (64, 5120)}
    # MiniMax-M3's sparse layers have four index queries and one index key in the fused projection.
    assert of(config_of("minimax_m3"), "qkv") == {(9216, 6144)}
    assert of(config_of("minimax_m3"), "qkv+index") == {(9216 + 5 * 128, 6144)}


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("deepseek_v3", {"router", "lm_head", "mtp.eh_proj"}),
        ("qwen3_next_80b", {"router", "lm_head", "mtp.fc", "in_proj_ba", "shared.gate"}),
        ("mimo_v2_flash", {"router", "lm_head", "o"}),
        ("minimax_m2", {"router", "lm_head"}),
        ("dots3_note", {"router", "lm_head", "indexer.wk+weights_proj"}),
    ],
)
def test_what_is_not_in_fp8_blocks(name: str, left: set[str]) -> None:
    made = linears(config_of(name))
    assert {one.what for one in made if not one.fp8} == left
    assert all(one.what not in left for one in made if one.fp8)


@pytest.mark.parametrize("name", ["kimi_k25", "glm_45_air_fp8", "minimax_m3_mxfp8", "gpt_oss_120b", "dots1"])
def test_other_formats_are_not_fp8_blocks(name: str) -> None:
    assert not any(one.fp8 for one in linears(config_of(name)))


def test_deepseek_v4_has_fp4_experts_unless_its_config_says_fp8() -> None:
    config = config_of("deepseek_v4_flash")
    experts = {one.fp8 for one in linears(config) if one.what.startswith("experts.")}
    assert experts == {False}
    base = linears({**config, "expert_dtype": "fp8"})
    assert {one.fp8 for one in base if one.what.startswith("experts.")} == {True}


def test_fused_parts_must_agree() -> None:
    config = config_of("deepseek_v3")
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.self_attn.q_a_proj"]
    with pytest.raises(ValueError, match="fuses quantized and unquantized"):
        linears(config)
