from __future__ import annotations

from pathlib import Path

import pytest

from moe_fp8.errors import ConfigError
from moe_fp8.settings import parse_settings


def test_defaults_follow_xdg_then_home() -> None:
    assert parse_settings({"XDG_CACHE_HOME": "/x", "HOME": "/h"}).cache_dir == Path("/x/moe_fp8")
    assert parse_settings({"HOME": "/h"}).cache_dir == Path("/h/.cache/moe_fp8")
    assert parse_settings({"XDG_CACHE_HOME": "relative", "HOME": "/h"}).cache_dir == Path("/h/.cache/moe_fp8")
    assert parse_settings({}).cache_dir is None
    plain = parse_settings({})
    assert plain.bundle is None and plain.checked_dir is None
    assert (plain.checked, plain.batch_invariant, plain.miss) == (False, False, "strict")
    assert plain.jobs >= 1


def test_values_are_parsed() -> None:
    given = parse_settings(
        {
            "MOE_FP8_CACHE_DIR": "/srv/kernels",
            "MOE_FP8_BUNDLE": "/srv/bundle",
            "MOE_FP8_CHECKED": "On",
            "MOE_FP8_CHECKED_DIR": "/srv/replay",
            "MOE_FP8_BATCH_INVARIANT": "1",
            "MOE_FP8_JOBS": "3",
            "MOE_FP8_JIT_MISS": "warn",
            "OTHER": "ignored",
        }
    )
    assert given.cache_dir == Path("/srv/kernels")
    assert given.bundle == Path("/srv/bundle")
    assert given.checked_dir == Path("/srv/replay")
    assert (given.checked, given.batch_invariant, given.jobs, given.miss) == (True, True, 3, "warn")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOE_FP8_CACHE_DIR", ""),
        ("MOE_FP8_CACHE_DIR", "relative/folder"),
        ("MOE_FP8_CACHE_DIR", "~nosuchuser/folder"),
        ("MOE_FP8_BUNDLE", ""),
        ("MOE_FP8_BUNDLE", "bundle"),
        ("MOE_FP8_CHECKED", "yes please"),
        ("MOE_FP8_CHECKED", ""),
        ("MOE_FP8_CHECKED_DIR", "replay"),
        ("MOE_FP8_BATCH_INVARIANT", "yes"),
        ("MOE_FP8_JOBS", "0"),
        ("MOE_FP8_JOBS", "-1"),
        ("MOE_FP8_JOBS", "two"),
        ("MOE_FP8_JOBS", "\N{ARABIC-INDIC DIGIT TWO}"),
        pytest.param("MOE_FP8_JOBS", "1" * 5000, id="too many digits"),
        ("MOE_FP8_JIT_MISS", "STRICT"),
        ("MOE_FP8_CHEKCED", "1"),
    ],
)
def test_bad_names_and_values_are_errors(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({name: value})
    assert caught.value.field == name
    assert caught.value.got == value


@pytest.mark.parametrize("service", ["", "ROUTER_", "MY_ROUTER_"])
def test_a_service_of_that_name_sets_nothing(service: str) -> None:
    address = "tcp://10.0.0.1:80"
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    assert parse_settings({f"MOE_FP8_{service}{name}": address for name in names}) == parse_settings({})
    for name in ("MOE_FP8_SERVICE", "MOE_FP8_PORTS", "MOE_FP8_PORT_TCP", "MOE_FP8_JIT_REPORT"):
        with pytest.raises(ConfigError):
            parse_settings({name: address})


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), ("true", True), ("on", True), ("0", False), ("false", False), ("OFF", False)],
)
def test_every_word_for_on_and_off(value: str, on: bool) -> None:
    given = parse_settings({"MOE_FP8_CHECKED": value, "MOE_FP8_DISPATCH": value})
    assert given.checked == given.dispatch == on


@pytest.mark.parametrize("name", ["MOE_FP8_CHECKED", "MOE_FP8_DISPATCH"])
def test_a_mode_that_must_see_every_call_goes_through_the_dispatcher(name: str) -> None:
    assert parse_settings({}).past_dispatcher
    assert not parse_settings({name: "1"}).past_dispatcher


def test_a_folder_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_settings({"MOE_FP8_BUNDLE": "~/bundle"}).bundle == Path("/home/me/bundle")
