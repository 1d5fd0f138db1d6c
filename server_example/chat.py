"""A chat as one prompt: the model's own chat template, or a plain one for models that have none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moe_fp8.errors import ConfigError

#: A line "role: content" for each message, then the start of the answer's line.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)

#: The tokens of a tokenizer's config that templates may name.
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(Exception):
    """The model's template refuses the messages."""


class ChatTemplate:
    """Renders messages. `own` is False for the plain template."""

    def __init__(self, source: str | None, tokens: dict[str, str]) -> None:
        self.own = source is not None
        self._tokens = tokens
        # The template is the model's, not the server's: it runs in a sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._template = environment.from_string(source if source is not None else PLAIN_TEMPLATE)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The template of `chat_template.jinja` or `tokenizer_config.json`. Raises `ConfigError`."""
        path = folder / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            source = config.get("chat_template")
            if isinstance(source, list):  # Several templates by name.
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            separate = folder / "chat_template.jinja"
            if separate.is_file():
                source = separate.read_text(encoding="utf-8")
            tokens = {name: _content(config[name]) for name in _TOKENS if config.get(name)}
            return cls(source, tokens)
        except (ValueError, LookupError, TypeError, AttributeError, jinja2.TemplateError) as error:
            raise ConfigError(path.name, "a tokenizer's config with a chat template", str(error)) from error

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt that asks for the assistant's next message. Raises `ChatTemplateError`."""
        try:
            return self._template.render(
                messages=list(messages),
                # Templates are written for transformers, which always gives these: undefined is not none.
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except Exception as error:  # The template is a program, which may fail in any way.
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers, with its options. Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
