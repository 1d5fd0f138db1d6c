"""A model's tokenizer; text to tokens; tokens to whole characters as they come, up to a stop string."""

from __future__ import annotations

import codecs
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from moe_fp8.errors import ConfigError

_PRINTING = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
#: A byte-level vocabulary writes a byte as its own character if it prints, and else as one from U+0100 on.
_BYTES = {chr(byte): byte for byte in _PRINTING} | {
    chr(0x100 + number): byte for number, byte in enumerate(sorted(set(range(0x100)) - set(_PRINTING)))
}


class TokenTexts:
    """The bytes of each token of a byte-level vocabulary, and the largest number of bytes of one token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = {number: _bytes(token) for token, number in tokenizer.get_vocab().items()}
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        self.most_bytes = max(map(len, self._bytes.values()))

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token, which may be a special one. A number without a token has none."""
        return self._bytes.get(token, b"")

    def written(self, token: int) -> bytes:
        """What the token adds to a text. A special one adds nothing."""
        return b"" if token in self._special else self[token]


def _bytes(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:  # an added token, which stands for itself
        return token.encode()


class TextStream:
    """The text of one request. The pieces from `push` and `finish`, joined, are its whole completion."""

    def __init__(self, texts: TokenTexts, stop: tuple[str, ...]) -> None:
        self._texts = texts
        self._stop = stop
        # A character may span tokens. What is no UTF-8 becomes U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        #: The characters that are complete, held ones and those after a stop string included.
        self.length = 0
        self.stopped = False

    def _hold(self) -> int:
        """The length of the longest end of `_held` that begins a stop string."""
        if not self._stop:
            return 0
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _take(self, keep: int) -> str:
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _accept(self, text: str) -> None:
        self.length += len(text)
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True

    def push(self, token: int) -> str:
        """The text that is certain after this token. Sets `stopped` once a stop string is complete."""
        self._accept(self._decoder.decode(self._texts.written(token)))
        return self._take(0 if self.stopped else self._hold())

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        if not self.stopped:
            self._accept(self._decoder.decode(b"", final=True))
        return self._take(0)


def encode(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """The tokens of a text. Call it on a worker thread: it takes long for a long text, without the GIL."""
    # This method leaves out the tokens' places in the text, and no release of it keeps the GIL.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    return list(encoding.ids)


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model. Raises `ConfigError`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("tokenizer.json", "a file in the model folder", None, "the checkpoint lacks it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no narrower exception.
        raise ConfigError("tokenizer.json", "a tokenizer of the tokenizers library", str(error)) from error
    if not isinstance(tokenizer.decoder, ByteLevel):
        found = type(tokenizer.decoder).__name__
        raise ConfigError("tokenizer.json: decoder", "ByteLevel, as DeepSeek-V3.2's", found)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError("tokenizer.json", f"at most {vocab_size} tokens", tokenizer.get_vocab_size())
    # A file saved after a training may pad texts to the longest one of a batch, or cut them.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
