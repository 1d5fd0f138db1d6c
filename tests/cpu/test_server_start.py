"""The start of the server: it refuses bad options and files, and its messages say why."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers.decoders import Metaspace

from moe_fp8.errors import ConfigError
from moe_fp8.jit.build import BuildReport
from server_example import demo
from server_example.app import Service
from server_example.backend import DeviceChoice, choose_backend, explained_memory
from server_example.cache import LayerCache
from server_example.engine import Engine
from server_example.host import run_engine
from server_example.messages import EngineUnavailableError, Job, SamplingParams, TokenEvent
from server_example.model.batch import PrefillBatch
from server_example.model.transformer import Transformer
from server_example.options import EngineOptions
from server_example.pages import PAGE_TOKENS
from server_example.scheduler import Request
from server_example.serve import Process, listen
from server_example.settings import Settings
from server_example.text import load_tokenizer
from tests.demo_model import demo_folder
from tests.engine_client import connected
from tests.live_server import children, environment, refused_start

__all__ = ["demo_folder"]


def test_a_missing_model_ends_the_start_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server_example", "--device", "cpu", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_is_killed_while_it_loads_is_told(demo_folder: Path) -> None:
    command = [sys.executable, "-m", "server_example", "--device", "cpu", "--port", "0"]
    command += ["--model", str(demo_folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            engines: list[int] = []
            while not engines:
                assert process.poll() is None
                engines = [pid for pid, line in children(process.pid).items() if "spawn_main" in line]
            os.kill(engines[0], signal.SIGKILL)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2
    assert said == "error: SIGKILL ended the engine's process while it loaded; is there enough memory?\n"


def test_padding_and_truncation_of_a_file_are_ignored(demo_folder: Path, tmp_path: Path) -> None:
    saved = load_tokenizer(demo_folder, 1 << 20)
    saved.enable_padding()
    saved.enable_truncation(2)
    saved.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path, 1 << 20)
    texts = ["A", "A much longer text than that"]
    assert [one.ids for one in loaded.encode_batch(texts)] == [loaded.encode(text).ids for text in texts]
    assert len(loaded.encode(texts[1]).ids) > 2 > len(loaded.encode(texts[0]).ids)


def test_a_vocabulary_larger_than_the_models_is_refused(demo_folder: Path) -> None:
    size = load_tokenizer(demo_folder, 1 << 20).get_vocab_size()
    assert load_tokenizer(demo_folder, size).get_vocab_size() == size
    with pytest.raises(ConfigError, match=f"at most {size - 1} tokens"):
        load_tokenizer(demo_folder, size - 1)


def test_a_vocabulary_without_bytes_is_refused(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(demo_folder, 1 << 20)
    tokenizer.decoder = Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder.*ByteLevel.*Metaspace"):
        load_tokenizer(tmp_path, 1 << 20)


def test_a_port_in_use_ends_the_start_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert "Address already in use" in refused_start("--model", str(tmp_path), "--port", str(port))


def test_connections_may_use_all_files_that_the_system_allows() -> None:
    code = """
import resource, sys
from server_example.serve import main
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
sys.argv = ["serve", "--port", "99999"]
assert main() == 2
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_few_connections_are_accepted_at_once(tmp_path: Path) -> None:
    """asyncio logs an error for each attempt while the process may open no more files."""
    with listen("127.0.0.1", 0) as sock:
        process = Process(Service(Settings.model_validate({"model": tmp_path})), sock)
        assert process._server.config.backlog <= 256


@pytest.mark.parametrize(
    ("module", "lacking"),
    [
        ("server_example", "uvicorn"),
        ("server_example.demo", "httpx"),
        ("server_example.perplexity", "tokenizers"),
        ("server_example.train", "tokenizers"),
    ],
)
def test_a_missing_library_is_named(module: str, lacking: str) -> None:
    code = (
        f"import runpy, sys; sys.modules[{lacking!r}] = None; runpy.run_module({module!r}, None, '__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"error: {lacking} is not installed; run: pip install -e '.[server]'\n"


def test_the_command_names_a_missing_library_too() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; from moe_fp8.cli import main; sys.exit(main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: uvicorn is not installed; run: pip install -e '.[server]'\n"


@pytest.mark.parametrize("lacking", ["torch", "safetensors"])
def test_a_library_that_only_the_engine_needs_is_named_too(lacking: str, tmp_path: Path) -> None:
    (tmp_path / f"{lacking}.py").write_text(f"raise ModuleNotFoundError(name={lacking!r})")
    command = [sys.executable, "-m", "server_example", "--device", "cpu", "--port", "0"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        command, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {lacking} is not installed; run: pip install -e '.[server]'\n"


def test_the_demo_asks_no_other_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "server_example.demo", "--once", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: port {port}: ") and "Traceback" not in done.stderr


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"no CUDA device .*'7'.*--device cpu"):
        choose_backend("cuda")
    assert choose_backend("auto").name == "reference"
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA"):
        choose_backend("cuda")


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_a_gpu_that_others_hold_is_not_replaced_by_the_cpu(
    choice: DeviceChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(device: int) -> tuple[int, int]:
        raise RuntimeError(
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors"
        )

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", busy)
    with pytest.raises(ConfigError, match=r"busy or unavailable.*nvidia-smi.*--device cpu") as error:
        choose_backend(choice)
    assert "kernel errors" not in str(error.value)


def test_a_lack_of_gpu_memory_ends_the_start_with_a_remedy(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nSee documentation")

    monkeypatch.setattr(LayerCache, "allocate", full)
    taken = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    near, far = multiprocessing.Pipe()
    try:
        run_engine(Settings.model_validate({"model": demo_folder, "device": "cpu"}), far)
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
    kind, _, said = near.recv()
    assert kind == "refused"
    assert "Tried to allocate 3.00 GiB" in said and "lower --cache-pages" in said
    with pytest.raises(ConfigError, match=r"^memory: .*lower --cache-pages"), explained_memory():
        torch.empty(1 << 60, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="another"), explained_memory():
        raise RuntimeError("another failure")


def test_the_warm_up_needs_as_much_memory_as_any_prompt(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves nothing on the pages of requests."""
    seen: list[tuple[int, int]] = []
    prefill = Transformer.prefill

    def watched(self: Transformer, batch: PrefillBatch, caches: list[LayerCache]) -> torch.Tensor:
        seen.append((len(batch.tokens), len(batch.context_slots)))
        return prefill(self, batch, caches)

    monkeypatch.setattr(Transformer, "prefill", watched)
    for pages, longest in ((129, 200), (3, 128), (2, 64)):
        options = EngineOptions(max_context=200, prefill_chunk=96, cache_pages=pages)
        engine = Engine(demo_folder, choose_backend("cpu"), options)
        engine.warm_up()
        assert seen.pop() == (min(96, longest), longest)
        assert engine.scheduler.pool.free == engine.scheduler.pool.capacity
        for cache in engine.caches:
            assert cache.latent[:PAGE_TOKENS].any() and cache.index[0].any()
            assert not cache.latent[PAGE_TOKENS:].any() and not cache.index[1:].any()


def test_the_demo_says_why_it_compiles_without_a_gpu(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(demo, "build_plan", lambda plan: BuildReport((), 0.0))
    demo.build_kernels(demo_folder, choose_backend())
    said = capsys.readouterr().out
    assert "plain torch on the CPU here" in said and "The kernels for Hopper" in said


def test_the_start_prints_the_url(demo_folder: Path) -> None:
    command = [sys.executable, "-m", "server_example", "--port", "0", "--model", str(demo_folder)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(CUDA_VISIBLE_DEVICES=""),
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        assert httpx.get(f"{found[0]}/ready").status_code == 200
        assert f"{found[0]}/openapi.json" in line and "without a key" in line
        process.terminate()
        _, said = process.communicate(timeout=40)
        assert process.returncode == 0
    assert said.count("which is slow; --device cuda would refuse") == 1


@pytest.mark.parametrize(
    "options", [{"max_batch": 0}, {"max_context": 1}, {"cache_pages": 1}, {"prefill_chunk": -1}]
)
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineOptions(**options)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_broken_file_is_named(demo_folder: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder, folder)
    (folder / name).write_bytes(b"\xff{not what it should be")
    with pytest.raises(ConfigError, match=name):
        Engine(folder, choose_backend("cpu"), EngineOptions())


def test_a_few_layers_with_random_weights(demo_folder: Path, tmp_path: Path) -> None:
    shutil.copy(demo_folder / "tokenizer.json", tmp_path)
    config = json.loads((demo_folder / "config.json").read_text())
    config["first_k_dense_replace"] = 2
    # transformers writes this list, too.
    config["mlp_layer_types"] = ["dense"] * 2 + ["sparse"] * (config["num_hidden_layers"] - 2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(
        tmp_path, choose_backend("cpu"), EngineOptions(load_format="dummy", num_hidden_layers=1, max_batch=2)
    )
    engine.warm_up()
    assert len(engine.caches) == engine.config.num_hidden_layers == 1


def test_a_failure_of_the_engine_reaches_every_request(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_batch=1))

    def fail(*args: object) -> None:
        raise ValueError("broken on purpose")

    monkeypatch.setattr(engine.model, "prefill", fail)
    events: list[list[TokenEvent]] = [[], []]
    requests = [Request([1, 2], SamplingParams(max_tokens=4), emit=box.append) for box in events]
    engine.start()
    engine.submit(*requests)
    engine._thread.join(timeout=20)
    for box in events:
        assert [(event.finish_reason, event.error) for event in box] == [
            ("error", "ValueError: broken on purpose")
        ]
    assert not engine.alive
    assert engine.scheduler.pool.free == engine.scheduler.pool.capacity
    with pytest.raises(EngineUnavailableError, match="broken on purpose"):
        engine.submit(Request([1], SamplingParams(), emit=events[0].append))


def test_the_client_of_an_engine_that_failed_says_so(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("broken on purpose")

    with connected(demo_folder) as (engine, client):
        monkeypatch.setattr(engine.model, "prefill", fail)
        told = asyncio.Queue[TokenEvent]()

        async def talk() -> None:
            await client.submit([Job(1, [1, 2], SamplingParams(max_tokens=4))], [told.put_nowait])
            assert (await told.get()).error == "ValueError: broken on purpose"
            while client.failure is None:
                await asyncio.sleep(0.01)
            assert client.failure == "ValueError: broken on purpose" and not client.alive

        asyncio.run(asyncio.wait_for(talk(), 20))
