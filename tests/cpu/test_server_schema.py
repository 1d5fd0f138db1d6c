"""Requests drawn from the server's OpenAPI document, right and wrong ones; none may fail the server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demo_model import demo_folder
from tests.live_server import live_server

__all__ = ["demo_folder"]

KEY = "a-key-of-the-tests"
OPERATIONS = 7


def test_schemathesis_finds_nothing(demo_folder: Path, tmp_path: Path) -> None:
    """All its phases and checks but one: a schema cannot say how many tokens the context has room for.

    Nor can it say how large a body may be, and a `timeout` may end before a prompt is found to be wrong.
    """
    pytest.importorskip("schemathesis", reason="its releases need Python 3.11")
    refusals = ["400", "401", "404", "405", "408", "413"]
    (tmp_path / "schemathesis.toml").write_text(
        f"[checks]\nnegative_data_rejection.expected-statuses = {refusals}\n"
    )
    with live_server(demo_folder, "--max-context", "24", "--api-key", KEY) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.base_url}/openapi.json"]
        command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--warnings", "off"]
        command += ["--seed", "1", "--max-examples", "20", "--header", f"Authorization: Bearer {KEY}"]
        command += ["--suppress-health-check", "all", "--request-timeout", "30", "--no-color"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        tested = re.search(r"Tested: (\d+)", done.stdout)
        assert tested is not None and int(tested[1]) == OPERATIONS, done.stdout
        generated = re.search(r"^server_generated_tokens_total (\S+)$", server.get("/metrics").text, re.M)
        assert generated is not None and float(generated[1]) > 100, "hardly a request was accepted"
        assert server.get("/health").json()["running"] == 0
