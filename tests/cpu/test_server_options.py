"""The server's options, from the command line and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from server_example.options import EngineOptions
from server_example.serve import read_settings
from tests.live_server import refused_start


def test_what_is_no_option_or_has_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable is as none, but an empty key on the command line would open the server to all."""
    for option in (["--api-key", ""], ["--api-key="], ["--host", ""]):
        with pytest.raises(SettingsError, match=f"^{option[0].rstrip('=')}: expected a text"):
            read_settings(option)
    settings = read_settings(["--api-key=aHVzaA=="])
    assert settings.api_key is not None and settings.api_key.get_secret_value() == "aHVzaA=="
    monkeypatch.setenv("SERVER_EXAMPLE_SERVICE_HOST", "10.0.0.1")  # Kubernetes sets these
    monkeypatch.setenv("SERVER_EXAMPLE_PORT_80_TCP", "tcp://10.0.0.1:80")
    monkeypatch.setenv("SERVER_EXAMPLE_PORT", "tcp://10.0.0.1:80")
    assert read_settings([]).port == 8000
    assert "error: SERVER_EXAMPLE_APIKEY: no option" in refused_start(SERVER_EXAMPLE_APIKEY="hush")


def test_options_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused_start("--port", "99999", SERVER_EXAMPLE_MODEL=str(tmp_path), SERVER_EXAMPLE_MAX_BATCH="0")
    assert "error: --port (or SERVER_EXAMPLE_PORT): " in said
    assert "error: --max-batch (or SERVER_EXAMPLE_MAX_BATCH): " in said
    monkeypatch.setenv("SERVER_EXAMPLE_MODEL", str(tmp_path))
    monkeypatch.setenv("SERVER_EXAMPLE_API_KEY", "hush")
    monkeypatch.setenv("SERVER_EXAMPLE_MAX_WAITING", "7")
    monkeypatch.setenv("SERVER_EXAMPLE_PREFILL_CHUNK", "")
    settings = read_settings(["--max-waiting", "9"])
    assert (settings.model, settings.max_waiting, settings.host) == (tmp_path, 9, "127.0.0.1")
    assert settings.api_key is not None and settings.api_key.get_secret_value() == "hush"
    assert "hush" not in repr(settings)
    assert settings.engine_options() == EngineOptions(max_waiting=9)


@pytest.mark.parametrize("key", ["k\n", " k", "k ", "ä", "\udcff", "a\x7fb"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="as a header has it"):
        read_settings(["--api-key", key])


def test_none_is_a_text_on_the_command_line_as_in_the_environment() -> None:
    key = read_settings(["--api-key", "None"]).api_key
    assert key is not None and key.get_secret_value() == "None"
    with pytest.raises(ValidationError):
        read_settings(["--num-hidden-layers", "None"])


@pytest.mark.parametrize("option", ["--max-batch", "--cache-pages"])
def test_a_size_beyond_all_memory_is_refused_by_its_name(option: str) -> None:
    assert refused_start(option, "1000000000000000000000").startswith(f"error: {option} (or ")


@pytest.mark.parametrize(
    ("option", "refused", "least"),
    [
        ("--receive-seconds", "0", "0.1"),
        ("--request-seconds", "-1", "0"),
        ("--drain-seconds", "-1", "0"),
        ("--max-body-bytes", "0", "1"),
        ("--num-hidden-layers", "0", "1"),
        ("--port", "-1", "0"),
    ],
)
def test_the_least_value_of_an_option(option: str, refused: str, least: str) -> None:
    with pytest.raises(ValidationError):
        read_settings([option, refused])
    found = getattr(read_settings([option, least]), option.removeprefix("--").replace("-", "_"))
    assert found == float(least)


def test_the_wait_for_the_engine_has_an_end() -> None:
    said = refused_start("--engine-seconds", "inf")
    assert said.startswith("error: --engine-seconds (or SERVER_EXAMPLE_ENGINE_SECONDS): ")
    for seconds in ("nan", "86401", "0"):
        with pytest.raises(ValidationError):
            read_settings(["--engine-seconds", seconds])
    assert read_settings(["--engine-seconds", "86400"]).engine_seconds == 86400


def test_origins_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    origins = ["https://a.example", "http://[::1]:80"]
    assert read_settings(["--cors-origins", ",".join(origins)]).cors_origins == origins
    for value, expected in ((", ".join(origins), origins), (origins[0], origins[:1]), ("*", ["*"]), ("", [])):
        monkeypatch.setenv("SERVER_EXAMPLE_CORS_ORIGINS", value)
        assert read_settings([]).cors_origins == expected
    for wrong in ("https://a.example/", "a.example", '["https://a.example"]', "["):
        said = refused_start(SERVER_EXAMPLE_CORS_ORIGINS=wrong)
        assert said.startswith("error: --cors-origins (or SERVER_EXAMPLE_CORS_ORIGINS): ")
        refused_start("--cors-origins", wrong)
