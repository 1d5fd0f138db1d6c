"""The drawn shapes are the same everywhere, have widths of real models, and are small enough to run."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest

from benchmarks import gemm, random_shapes, report, shapes, unseen_shapes
from benchmarks.results import FEW_ROUNDS, OF_A_COMMIT, ROOT, UNSEEN, set_of, shape_dict
from benchmarks.shapes import GroupedShape, aligned_starts
from benchmarks.timing import MOST_SETS, plan_rotation

L2 = 60 << 20

#: Hashes of two commits that do not exist.
COMMITS = ("0123456789" * 4, "fedcba9876" * 4)

DRAWS = unseen_shapes.DRAWS[UNSEEN]


def test_thirty_a_class_and_the_same_in_every_process() -> None:
    program = "from benchmarks import random_shapes as r; print(r.DENSE, r.CONTIGUOUS, r.MASKED)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lists = (random_shapes.DENSE, random_shapes.CONTIGUOUS, random_shapes.MASKED)
    assert done.stdout.split() == " ".join(map(str, lists)).split()
    assert [len(set(drawn)) for drawn in lists] == [30, 30, 30]


def test_twenty_of_topk_and_the_same_in_every_process() -> None:
    program = "from benchmarks import random_shapes as r; print(r.TOPK)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(random_shapes.TOPK)
    assert len(set(random_shapes.TOPK)) == 20
    for shape in (*random_shapes.TOPK, *shapes.TOPK):
        assert shape.k <= shape.columns and 4 * shape.rows * shape.columns <= shapes.MOST_LOGITS
        assert max(shape.ends()) == shape.columns and min(shape.ends()) > 0


def test_they_are_not_the_listed_ones() -> None:
    assert not set(random_shapes.DENSE) & set(shapes.DENSE)
    assert not set(random_shapes.CONTIGUOUS) & set(shapes.CONTIGUOUS)
    assert not set(random_shapes.MASKED) & set(shapes.MASKED)


@pytest.mark.parametrize(
    "width",
    [
        (2112, 7168),  # DeepSeek-V3, fused q_a and kv_a
        (3072, 1536),  # DeepSeek-V3, q_b at TP8
        (2624, 6144),  # GLM-5, fused q_a and kv_a
        (14336, 5120),  # GLM-4.5, qkv
        (1280, 4096),  # Qwen3-235B, qkv at TP8
        (7168, 256),  # a shared expert of 2048 at TP8
    ],
)
def test_the_widths_are_those_of_the_models(width: tuple[int, int]) -> None:
    assert width in random_shapes.dense_widths()


def test_the_experts_are_those_of_the_models() -> None:
    pool = random_shapes.expert_widths()
    for expected in ((32, 4096, 7168), (8, 7168, 2048), (48, 7168, 2048), (16, 3072, 4096), (4, 1536, 2048)):
        assert expected in pool
    assert all(n % 64 == 0 and k % 128 == 0 for _, n, k in pool)


def test_rows_go_from_one_to_many_and_experts_differ() -> None:
    assert random_shapes.DENSE[0].m == 1 and random_shapes.DENSE[-1].m > 8192
    contiguous, masked = random_shapes.CONTIGUOUS, random_shapes.MASKED
    assert {shape.layout for shape in contiguous} == {"m_indices", "psum", "offsets"}
    for drawn in (contiguous, masked):
        assert drawn[0].rows_per_expert == 1 and drawn[-1].rows_per_expert > 700
        assert {shape.skew for shape in drawn} == {"spread", "zipf", "sparse"}
        assert sum(0 in shape.counts() for shape in drawn) >= 5


@pytest.mark.parametrize("cls", DRAWS)
def test_a_commit_has_shapes_of_its_own(cls: str) -> None:
    program = f"from benchmarks import unseen_shapes as u; print(u.{cls}({COMMITS[0]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    one, other = (DRAWS[cls](commit) for commit in COMMITS)
    assert done.stdout.strip() == str(one)
    assert len(set(one)) == len(one) >= 20
    assert len(set(one) & set(other)) <= 2


@pytest.mark.parametrize("commit", ["abc", "0123456789" * 4 + "-dirty", ""])
def test_unseen_shapes_need_a_full_hash(commit: str) -> None:
    with pytest.raises(ValueError, match="40 hex digits"):
        unseen_shapes.dense(commit)


@pytest.mark.parametrize("commit", COMMITS)
def test_unseen_shapes_are_new_and_of_models_that_nothing_was_fitted_to(commit: str) -> None:
    assert (
        len(random_shapes.UNFITTED) >= 2 and not random_shapes.UNFITTED.keys() & random_shapes.MODELS.keys()
    )
    own_dense = {
        width for model in random_shapes.UNFITTED.values() for width in random_shapes.dense_widths([model])
    }
    drawn = unseen_shapes.dense(commit)
    assert not set(drawn) & {*shapes.DENSE, *random_shapes.DENSE}
    assert sum((shape.n, shape.k) in own_dense for shape in drawn) >= len(drawn) // 2
    for name, model in random_shapes.UNFITTED.items():
        own = {(n, k) for _, n, k in random_shapes.expert_widths(models=[model])}
        for grouped in (unseen_shapes.contiguous(commit), unseen_shapes.masked(commit)):
            assert any((shape.n, shape.k) in own for shape in grouped), name
    assert not set(unseen_shapes.contiguous(commit)) & {*shapes.CONTIGUOUS, *random_shapes.CONTIGUOUS}
    assert not set(unseen_shapes.masked(commit)) & {*shapes.MASKED, *random_shapes.MASKED}


@pytest.mark.parametrize("commit", COMMITS)
def test_unseen_shapes_include_few_experts_of_many_rows(commit: str) -> None:
    for drawn in (unseen_shapes.contiguous(commit), unseen_shapes.masked(commit)):
        for experts in (1, 2, 4):
            few = [shape for shape in drawn if shape.num_experts == experts]
            assert sum(200 <= shape.rows_per_expert <= 2000 for shape in few) >= 2


@pytest.mark.parametrize("commit", COMMITS)
def test_sixty_shapes_of_few_rounds(commit: str) -> None:
    dense, *grouped = (draw(commit) for draw in unseen_shapes.DRAWS[FEW_ROUNDS].values())
    assert all(129 <= shape.m <= 2048 for shape in dense) and len(set(dense)) == 20
    for drawn in grouped:
        assert len(set(drawn)) == 20
        assert all(1 <= shape.num_experts <= 8 and 128 <= shape.rows_per_expert <= 1024 for shape in drawn)
        assert len({shape.num_experts for shape in drawn}) >= 5
    assert {shape.layout for shape in grouped[0]} == {"m_indices", "psum", "offsets"}


@pytest.mark.parametrize(
    ("width", "model"),
    [
        ((8192, 3072), "MiniMax-M2"),  # qkv
        ((3072, 768), "MiniMax-M2"),  # the output projection at TP8
        ((1536, 4096), "DeepSeek-V4-Flash"),  # fused q_a and kv
        ((32768, 1024), "DeepSeek-V4-Flash"),  # q_b
        ((4096, 1024), "DeepSeek-V4-Flash"),  # o_b at TP8, and q_b at TP8
        ((8192, 1024), "DeepSeek-V4-Flash"),  # the indexer's queries
        ((4096, 4096), "DeepSeek-V4-Flash"),  # the shared expert
        ((4096, 2048), "DeepSeek-V4-Flash"),
    ],
)
def test_the_widths_of_unfitted_models(width: tuple[int, int], model: str) -> None:
    assert width in random_shapes.dense_widths([random_shapes.UNFITTED[model]])


def test_published_sets_are_whole_draws_of_one_commit() -> None:
    found = 0
    for device in report.load_results():
        published = defaultdict(list)
        for row in device["rows"]:
            if (name := set_of(row["shape"])) in OF_A_COMMIT:
                published[name, row["class"]].append(row)
        for (name, cls), rows in published.items():
            (commit,) = {row["commit"] for row in rows}
            drawn = [shape_dict(shape) | {"set": name} for shape in unseen_shapes.DRAWS[name][cls](commit)]
            assert sorted(map(str, drawn)) == sorted(str(row["shape"]) for row in rows), (name, cls)
            found += 1
    assert found


@pytest.mark.parametrize(
    "shape",
    [
        *random_shapes.CONTIGUOUS,
        *random_shapes.MASKED,
        *(shape for commit in COMMITS for shape in unseen_shapes.contiguous(commit)),
        *(shape for commit in COMMITS for shape in unseen_shapes.masked(commit)),
        *(shape for commit in COMMITS for shape in unseen_shapes.few_rounds_contiguous(commit)),
        *(shape for commit in COMMITS for shape in unseen_shapes.few_rounds_masked(commit)),
    ],
    ids=str,
)
def test_a_grouped_shape_fits_in_30_gb(shape: GroupedShape) -> None:
    e, n, k, counts = shape.num_experts, shape.n, shape.k, shape.counts()
    rows = e * max(gemm._MASKED_ROWS, *counts) if shape.layout == "masked" else aligned_starts(counts)[-1]
    most_sets = min(MOST_SETS, max(2, gemm._MOST_ROW_BYTES // (rows * (k + 4 * n))))
    sets, _ = plan_rotation(e * n * k, L2, most_sets)
    # Each set has weights, two activations (for `offsets` one belongs to the peer) and two outputs.
    held = sets * (e * n * k + rows * (2 * k + 4 * n))
    # float64 copies while the largest expert is checked, or bf16 while rows are quantized.
    checking = 24 * (max(counts) * (n + k) + n * k)
    quantizing = 4 * rows * k
    assert held + max(checking, quantizing) < 30e9
    assert 2 * sum(counts) * n * k < 4e12
