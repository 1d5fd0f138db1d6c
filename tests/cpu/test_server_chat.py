"""Chat templates: the model's own, the plain one, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.errors import ConfigError
from server_example.chat import ChatTemplate, ChatTemplateError

ROOT = Path(__file__).resolve().parents[2]

OWN = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = [{"role": "user", "content": "<Hi> & 'you'"}]


def load(folder: Path, **config: Any) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate.load(folder)


def test_the_models_own_template(tmp_path: Path) -> None:
    tokens = {"bos_token": "[", "eos_token": {"content": "]", "lstrip": False}}
    expected = "[<user><Hi> & 'you']<assistant>"
    template = load(tmp_path, chat_template=OWN, **tokens)
    assert template.own
    assert template.render(USER) == expected
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": OWN}]
    assert load(tmp_path, chat_template=named, **tokens).render(USER) == expected
    (tmp_path / "chat_template.jinja").write_text(OWN)
    assert load(tmp_path, **tokens).render(USER) == expected


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_is_utf_8_in_any_locale(tmp_path: Path, file: str) -> None:
    token = "<｜User｜>"  # as DeepSeek spells it
    text = token if file.endswith(".jinja") else json.dumps({"chat_template": token}, ensure_ascii=False)
    (tmp_path / file).write_text(text, encoding="utf-8")
    program = (
        "import sys\nfrom pathlib import Path\nfrom server_example.chat import ChatTemplate\n"
        "print(ascii(ChatTemplate.load(Path(sys.argv[1])).render([])))"
    )
    # The interpreter then takes ASCII for text files, as it takes Latin-1 with LANG=en_US.
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == ascii(token), done.stderr


def test_a_model_without_template_gets_the_plain_one(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path)
    assert not template.own
    assert template.render([{"role": "system", "content": "Be brief."}, *USER]) == (
        "system: Be brief.\nuser: <Hi> & 'you'\nassistant:"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}", ""),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<Hi> & \'you\'"}'),
        ("{{ 'ü' | tojson }}{{ 'ü' | tojson(ensure_ascii=True) }}", '"ü""\\u00fc"'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=True) }}", '{"a":2,"b":1}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "01"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_a_template_has_what_transformers_gives_it(tmp_path: Path, source: str, expected: str) -> None:
    assert load(tmp_path, chat_template=source).render(USER) == expected


def test_a_template_names_special_tokens(tmp_path: Path) -> None:
    tokens = {"pad_token": "<pad>", "unk_token": {"content": "<unk>"}, "sep_token": None}
    source = "{{ pad_token }}{{ unk_token }}{{ sep_token is defined }}"
    assert load(tmp_path, chat_template=source, **tokens).render(USER) == "<pad><unk>False"


def test_a_template_may_refuse_messages(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no system"):
        load(tmp_path, chat_template=OWN).render([{"role": "system", "content": ""}])


def test_a_template_may_fail_in_any_way(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="zero"):
        load(tmp_path, chat_template="{{ 1 / 0 }}").render(USER)


def test_a_template_reaches_nothing_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError):
        load(tmp_path, chat_template="{{ messages.__class__.__mro__ }}").render(USER)


@pytest.mark.parametrize("config", ['{"chat_template": "{% if"}', "[]", "{", '{"chat_template": [1]}'])
def test_a_broken_template_ends_the_start(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)
