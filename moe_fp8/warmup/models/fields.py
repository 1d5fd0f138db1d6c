"""Typed, strict access to a model's `config.json`, which notes every missing field before it complains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, cast

from moe_fp8.errors import ModelError

#: Where models with images or speech keep the config of the language model.
NESTED = ("text_config", "language_config", "llm_config")

#: The largest number of a field that has no bound of its own.
_MOST = 2**31 - 1


def read_config(path: str | Path) -> dict[str, Any]:
    """The JSON object in `path`: a config file, or a model folder that has a `config.json`.

    Raises ModelError if the file does not exist, cannot be read or is not a JSON object.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file /= "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            str(file), "a readable config.json", error.strerror, "pass a model folder or its config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(str(file), "a JSON object", str(error)) from error
    if not isinstance(config, dict):
        raise ModelError(str(file), "a JSON object", type(config).__name__)
    return cast("dict[str, Any]", config)


class Fields:
    """The fields of one config. A field of the nested language model hides the outer field of its name.

    A missing number is noted and read as 1, so that one error can name all missing fields. A contradiction is
    noted too, because a missing number may cause it. `complete` raises what was noted.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested: dict[str, Any] = next(
            (config[name] for name in NESTED if isinstance(config.get(name), dict)), {}
        )
        self._outer = config
        self._config = {**config, **{name: value for name, value in nested.items() if value is not None}}
        self._missing: list[str] = []
        self._contradictions: list[ModelError] = []

    def raw(self, name: str) -> Any:
        return self._config.get(name)

    def replace(self, name: str, value: str) -> None:
        """Read `value` for the field from now on."""
        self._config[name] = value

    def outer(self, name: str) -> Any:
        """The field of the outer config."""
        return self._outer.get(name)

    def lacking(self, *names: str) -> list[str]:
        """Those of `names` that are missing."""
        return [name for name in names if not self.has(name)]

    def within(self, name: str, *keys: str) -> Fields | None:
        """These fields with those of the object `name`, or of its first object `name[key]`, in their place.

        None without such an object.
        """
        inner = self._config.get(name)
        places = [inner.get(key) for key in keys] if isinstance(inner, dict) and keys else [inner]
        for place in places:
            if isinstance(place, dict):
                found = copy(self)  # what is missing there is missing here
                found._config = {**self._config, **place}
                return found
        return None

    def has(self, name: str) -> bool:
        """Whether the field exists and is not null."""
        return self._config.get(name) is not None

    def number(self, *names: str, least: int = 1, most: int = _MOST, default: int | None = None) -> int:
        """The value of a field, which may have several names.

        Raises ModelError for a value that is no integer from `least` to `most`, and for names with different
        values.
        """
        found = {
            name: self._integer(name, self._config[name], least, most) for name in names if self.has(name)
        }
        if len(set(found.values())) > 1:
            raise ModelError(" | ".join(found), "one value", found, "remove the field that is wrong")
        if found:
            return next(iter(found.values()))
        if default is None:
            self._missing.append(" | ".join(names))
            return max(1, least)
        return default

    def most(self, *names: str, default: int | None = None) -> int:
        """The greatest value of a field that holds an integer, or one integer for each layer."""
        for name in names:
            value = self._config.get(name)
            if isinstance(value, list) and value:
                return max(self._integer(name, each, 0) for each in value)
        return self.number(*names, least=0, default=default)

    def same(self, *names: str, default: int | None = None) -> int:
        """The value of a field that holds an integer, or an equal integer for each layer."""
        for name in names:
            value = self._config.get(name)
            found = {self._integer(name, each, 0) for each in value} if isinstance(value, list) else set()
            if len(found) > 1:
                raise ModelError(
                    name, "one value for all layers", sorted(found), "layers of several sizes are not planned"
                )
        return self.most(*names, default=default)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(name, "true or false", value)
        return value

    def text(self, name: str) -> str:
        value = self._config.get(name)
        if not isinstance(value, str) or not value:
            raise ModelError(name, "a string", value, "the model's config.json must have it")
        return value

    def words(self, name: str, layers: int) -> list[str] | None:
        """A list of a word for each layer, or None if the field is missing. Further words are left out."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ModelError(name, "a list of words", value)
        if len(value) < layers:
            raise ModelError(name, f"a word for each of {layers} layers", len(value))
        return cast("list[str]", value[:layers])

    def numbers(self, name: str) -> list[int] | None:
        """A list of integers >= 0, or None if the field is missing."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise ModelError(name, "a list of integers", value)
        return [self._integer(name, each, 0) for each in value]

    def demand(self, holds: bool, field: str, expected: str, got: Any) -> None:
        """Note a contradiction, unless the condition holds."""
        if not holds:
            self._contradictions.append(ModelError(field, expected, got))

    def complete(self) -> None:
        """Raise ModelError for all missing fields, else for the first contradiction."""
        if self._missing:
            raise ModelError(
                ", ".join(dict.fromkeys(self._missing)),
                "these fields",
                None,
                f"config.json of a {self.raw('model_type')} model must have them",
            )
        if self._contradictions:
            raise self._contradictions[0]

    @staticmethod
    def _integer(name: str, value: Any, least: int, most: int = _MOST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            upper = "2**31 - 1" if most == _MOST else f"{most:,}"
            raise ModelError(name, f"an integer from {least} to {upper}", value)
        return value
