"""Copies the few sources that the tests of layers load, for a machine that has no package index.

python -m tests.engines.trim FOLDER      # and there: XDG_CACHE_HOME=/absolute/FOLDER
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tests.engines import sglang_layers, vllm_layers
from tests.engines.layers import EngineLayers
from tests.engines.sources import fetch


def everything() -> list[EngineLayers]:
    """What the tests load of each engine."""
    return [EngineLayers(module.RELEASE, module.REAL, {}) for module in (vllm_layers, sglang_layers)]


def copy(folder: Path) -> None:
    """Copy the sources into `folder`, where XDG_CACHE_HOME=`folder` finds them."""
    for layers in everything():
        home = fetch(layers.engine)
        for name in layers.real:
            source = layers.source(name)
            to = folder / "moe_fp8_tests" / layers.engine.name / source.relative_to(home)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.trim", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the sources go")
    copy(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
