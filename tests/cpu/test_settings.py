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
