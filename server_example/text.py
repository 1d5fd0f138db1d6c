"""Text to tokens; tokens to text as they come, in whole characters and without the begin of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_PARTIAL = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """The texts of tokens, and the largest number of bytes that one token stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._single: dict[int, str] = {}
        self.most_bytes = max(len(token.encode()) for token in tokenizer.get_vocab())

    def __getitem__(self, token: int) -> str:
        """The text of a token, which may be a special one."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a run of tokens, without special ones. The texts of single tokens are remembered."""
        if len(tokens) != 1:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        text = self._single.get(tokens[0])
        if text is None:
            text = str(self._tokenizer.decode([tokens[0]], skip_special_tokens=True))
            self._single[tokens[0]] = text
        return text


class TextStream:
    """The text of one request. The pieces from `push` and `finish`, joined, are its whole completion."""

    def __init__(self, texts: TokenTexts, stop: tuple[str, ...]) -> None:
        self._texts = texts
        self._stop = stop
        self._tokens: list[int] = []
        self._decoded_upto = 0
        self._held = ""
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
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True

    def _pending(self) -> str:
        return self._texts.decode(self._tokens[self._decoded_upto :])

    def push(self, token: int) -> str:
        """The text that is certain after this token. Sets `stopped` once a stop string is complete."""
        self._tokens.append(token)
        text = self._pending()
        # A character may span tokens. It has four bytes at most, so longer runs of U+FFFD are not incomplete.
        if text.endswith(_PARTIAL) and len(self._tokens) - self._decoded_upto < 4:
            return ""
        self._decoded_upto = len(self._tokens)
        self._accept(text)
        return self._take(0 if self.stopped else self._hold())

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        if not self.stopped and self._decoded_upto < len(self._tokens):
            text = self._pending()
            self._decoded_upto = len(self._tokens)
            self._accept(text)
        return self._take(0)


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
    """The tokens of each text. Call it on a worker thread: it takes long for long texts, without the GIL."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=special)
    return [list(encoding.ids) for encoding in encoded]
