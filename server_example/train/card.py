"""The model card of a trained model: what it is, from which text, and how well it predicts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

CARD = """---
language: en
library_name: moe_fp8
license: apache-2.0
tags: [deepseek_v32, fp8, text-generation]
---
# A small DeepSeek-V3.2 that writes Shakespeare

The model has DeepSeek-V3.2's architecture: latent attention, an indexer that selects {index_topk} tokens,
and {n_routed_experts} routed experts of which {num_experts_per_tok} serve a token, beside a shared expert.
`python -m server_example --model DIR` serves it. Its weights are FP8 (e4m3) in blocks of 128 x 128 with
fp32 scales, {megabytes:.1f} MB with the embeddings. The training also writes `bf16/`, the same weights before
the quantization.
It is made to test and to show `moe_fp8`. It knows nothing but old verse.

## Data

The text is the plays and poems of William Shakespeare, {tokens} tokens. They come from Project Gutenberg by
way of the package `shakespeare` 0.6 (files `*_gut.txt`). The texts are in the public domain. The package's
code has the MIT license. Its authors, the Open Knowledge Foundation, license what else is theirs under
Creative Commons Attribution 2.5. The play {held_out} is in `heldout.txt` and was not trained on.

## Training

`python -m server_example.train`, {seconds:.0f} s, with {options}.

## Perplexity on the held-out play

```
{perplexity}
```

`python -m server_example.perplexity DIR` measures it again, in bf16 only with `bf16/`.
"""


def model_card(
    folder: Path, config: dict[str, Any], options: Any, tokens: int, seconds: float, perplexity: str
) -> str:
    """The text of `README.md`; `options` is the dataclass of the training run."""
    return CARD.format(
        **{name: config[name] for name in ("index_topk", "n_routed_experts", "num_experts_per_tok")},
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        tokens=tokens,
        held_out="Macbeth",
        seconds=seconds,
        options=", ".join(f"{name} {value}" for name, value in asdict(options).items()),
        perplexity=perplexity,
    )
