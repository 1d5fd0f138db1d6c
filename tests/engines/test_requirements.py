"""What the engines require, compared with what this package requires and with what its pages say."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from moe_fp8 import doctor
from moe_fp8.integrations.supported import ENGINES as SUPPORTED
from tests.engines.sources import ENGINES, Engine, fetch, skipped

pytestmark = pytest.mark.skipif(skipped(), reason="ENGINE_SOURCES=skip")

DOCS = Path(__file__).parents[2] / "docs"


def required_torch(engine: Engine) -> str:
    """The version of torch that the engine pins."""
    (information,) = fetch(engine).glob("*.dist-info")
    pins = [
        found[1]
        for requirement in metadata.Distribution.at(information).requires or ()
        if (found := re.match(r"torch==([\d.]+)", requirement))
    ]
    assert len(pins) == 1
    return pins[0]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_the_page_tells_which_torch_is_not_tested(engine: Engine) -> None:
    assert engine.version in SUPPORTED[engine.package].versions
    page = " ".join((DOCS / f"{engine.package}.md").read_text().split())
    title, pin = SUPPORTED[engine.package].title, required_torch(engine)
    told = f"{title} {engine.version} requires PyTorch {pin}, with which this package is not tested" in page
    assert told != doctor._fits(pin, doctor._requirement("torch")), pin


def test_the_readme_names_the_tested_torch() -> None:
    (least,) = re.findall(r">=2\.(\d+)", doctor._requirement("torch"))
    (below,) = re.findall(r"<2\.(\d+)", doctor._requirement("torch"))
    assert f"PyTorch 2.{least} to 2.{int(below) - 1}" in (DOCS.parent / "README.md").read_text()
    assert "README.md#install) has the versions of PyTorch" in (DOCS / "engines.md").read_text()
    for engine in SUPPORTED:
        assert "(engines.md#install-and-turn-on)" in (DOCS / f"{engine}.md").read_text()
