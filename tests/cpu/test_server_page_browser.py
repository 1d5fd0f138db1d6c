"""The page in headless Chromium, used by keyboard, against a live server on the reference backend.

It needs a Chromium on the path (Debian: `apt-get install chromium`); with REQUIRE_BROWSER=1 in the
environment, as in CI, it fails without one. With `--screenshots docs/images` it
writes the pictures that README and docs show.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.demo_model import demo_folder
from tests.live_server import eventually, live_server

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright (extra: test)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("REQUIRE_BROWSER"),
    reason="needs Chromium on the path, as from `apt-get install chromium`",
)

__all__ = ["demo_folder"]

KEY = "a key of the tests"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PICTURE_BYTES = 150_000
PROMPT = "Enter HAMLET and the king"


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    assert CHROMIUM is not None, "REQUIRE_BROWSER is set, and there is no Chromium on the path"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        sync_api.expect.set_options(timeout=30_000)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(demo_folder: Path) -> Iterator[httpx.Client]:
    with live_server(demo_folder) as client:
        yield client


@contextmanager
def opened(
    browser: sync_api.Browser, server: httpx.Client, allowed: str = "no error", **options: object
) -> Iterator[sync_api.Page]:
    """The page in a fresh profile. No console error but `allowed`, and no request to another host."""
    context = browser.new_context(base_url=str(server.base_url), **options)
    context.set_default_timeout(30_000)
    page = context.new_page()
    errors: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(httpx.URL(request.url).netloc.decode()))
    page.goto("/")
    yield page
    context.close()
    assert [text for text in errors if allowed not in text] == []
    assert hosts == {server.base_url.netloc.decode()}


@pytest.fixture
def page(browser: sync_api.Browser, server: httpx.Client) -> Iterator[sync_api.Page]:
    with opened(browser, server) as page:
        yield page


def focused(page: sync_api.Page) -> str:
    return str(page.evaluate("document.activeElement.id"))


def type_into(page: sync_api.Page, field: str, text: str) -> None:
    """By keyboard: Tab to the field, replace what it has."""
    for _ in range(20):
        if focused(page) == field:
            break
        page.keyboard.press("Tab")
    assert focused(page) == field
    page.keyboard.press("Control+a")
    page.keyboard.type(text)


def test_a_prompt_by_keyboard_gives_tokens_one_after_another(
    page: sync_api.Page, server: httpx.Client
) -> None:
    # The times at which the answer grew, and its lengths.
    page.evaluate(
        """() => {
            window.growth = [];
            const output = document.getElementById("output");
            const note = () => window.growth.push([performance.now(), output.textContent.length]);
            new MutationObserver(note).observe(output, { childList: true });
        }"""
    )
    type_into(page, "prompt", "The king")
    type_into(page, "max-tokens", "40")
    type_into(page, "temperature", "0")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#status")).to_contain_text("40 tokens in")
    sync_api.expect(page.locator("#status")).to_contain_text("per second; the most tokens were reached.")
    body = {"prompt": "The king", "max_tokens": 40, "temperature": 0}
    expected = server.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert page.locator("#output").text_content() == expected
    growth = [(at, length) for at, length in page.evaluate("window.growth") if length]
    assert [length for _, length in growth] == sorted({length for _, length in growth})
    assert len({at for at, _ in growth}) > 20, "the text came in few pieces"


@pytest.mark.parametrize("way", ["Escape", "Stop"])
def test_stopping_closes_the_connection(page: sync_api.Page, server: httpx.Client, way: str) -> None:
    def cancelled() -> float:
        for line in server.get("/metrics").text.splitlines():
            if line.startswith('server_requests_total{reason="cancelled"}'):
                return float(line.split()[-1])
        return 0

    before = cancelled()
    type_into(page, "max-tokens", "900")
    type_into(page, "prompt", "The router")
    page.keyboard.press("Control+Enter")
    sync_api.expect(page.locator("#output")).not_to_be_empty()
    if way == "Escape":
        assert focused(page) == "prompt"
        page.keyboard.press("Escape")
    else:
        while focused(page) != "stop":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
    sync_api.expect(page.locator("#status")).to_have_text("Stopped.")
    assert eventually(lambda: cancelled() == before + 1)
    assert server.get("/health").json()["running"] == 0
    assert focused(page) == ("prompt" if way == "Escape" else "generate"), "the focus was lost"
    sync_api.expect(page.locator("#stop")).to_be_disabled()


def test_focus_goes_in_order_and_is_visible(page: sync_api.Page) -> None:
    seen = []
    for _ in range(6):
        page.keyboard.press("Tab")
        seen.append(focused(page))
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width >= 2, f"the focus of {seen[-1]} cannot be seen"
    assert seen == ["prompt", "max-tokens", "temperature", "generate", "output", "live"]
    for label in ("Prompt", "Most tokens", "Temperature", "Live plots", "Answer"):
        sync_api.expect(page.get_by_label(label)).to_have_count(1)


def test_the_plots_get_points_and_can_be_paused(page: sync_api.Page, server: httpx.Client) -> None:
    def points(plot: str) -> int:
        return str(page.locator(f"#{plot} path").first.get_attribute("d")).count("L")

    type_into(page, "prompt", "The king")
    type_into(page, "max-tokens", "900")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#experts rect")).to_have_count(16)
    sync_api.expect(page.locator("#steps")).to_have_attribute("aria-label", re.compile(r"decode [\d.]+ ms"))
    sync_api.expect(page.locator("#batch")).to_have_attribute(
        "aria-label", re.compile(r": 1 decoding, 0 waiting")
    )
    sync_api.expect(page.locator("#cache")).to_have_attribute(
        "aria-label", re.compile(r"[1-9]\d* of 128 pages")
    )
    sync_api.expect(page.locator("#experts")).to_have_attribute("aria-label", re.compile(r"[1-9]\d*,"))
    before = points("steps")
    assert eventually(lambda: points("steps") > before + 3)
    assert min(points("batch"), points("cache")) >= points("steps")
    texts = page.locator("#steps text").all_text_contents()
    assert {"milliseconds", "seconds", "now", "-60", "0"} <= set(texts)

    while focused(page) != "live":
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    paused = points("batch")
    page.wait_for_timeout(1500)
    assert points("batch") == paused
    page.keyboard.press("Space")
    assert eventually(lambda: points("batch") > paused)
    page.keyboard.press("Escape")


def test_an_error_of_the_server_is_shown(browser: sync_api.Browser, server: httpx.Client) -> None:
    with opened(browser, server, allowed="status of 400") as page:
        type_into(page, "max-tokens", "100000")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#status")).to_contain_text("exceed the context")


def test_the_page_asks_for_the_key(browser: sync_api.Browser, demo_folder: Path) -> None:
    with (
        live_server(demo_folder, "--api-key", KEY) as server,
        opened(browser, server, allowed="status of 401") as page,
    ):
        for typed in ("wrong", KEY):
            sync_api.expect(page.get_by_label("API key")).to_be_focused()
            page.keyboard.type(typed)
            page.keyboard.press("Enter")
        sync_api.expect(page.locator("#experts rect")).to_have_count(16)
        sync_api.expect(page.locator("#key-form")).to_be_hidden()
        type_into(page, "max-tokens", "3")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#status")).to_contain_text("3 tokens in")
        assert page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])") == (
            '[{},{},""]'
        )


#: The contrast of each text with what lies behind it, by WCAG 2.1.
CONTRAST = """() => {
    const light = (color) => {
        const [r, g, b] = color.match(/[\\d.]+/g).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
        const color = getComputedStyle(element).backgroundColor;
        return /, 0\\)$/.test(color) ? behind(element.parentElement) : color;
    };
    return [...document.querySelectorAll("p, h1, h2, h3, label, button, textarea, .key, svg text")]
        .filter((element) => element.getClientRects().length && !element.disabled)
        .map((element) => {
            const style = getComputedStyle(element);
            const text = element.tagName === "text" ? style.fill : style.color;
            const [high, low] = [light(text), light(behind(element))].sort((a, b) => b - a);
            return [element.id || element.textContent, (high + 0.05) / (low + 0.05)];
        });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser: sync_api.Browser, server: httpx.Client, scheme: str) -> None:
    with opened(browser, server, color_scheme=scheme, viewport={"width": 320, "height": 600}) as page:
        sync_api.expect(page.locator("#experts rect")).to_have_count(16)
        contrasts = page.evaluate(CONTRAST)
        assert len(contrasts) > 30
        assert [pair for pair in contrasts if pair[1] < 4.5] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(22, 24, 28)") == (scheme == "dark")


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion(browser: sync_api.Browser, server: httpx.Client, motion: str) -> None:
    with opened(browser, server, reduced_motion=motion) as page:
        type_into(page, "max-tokens", "900")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#output[aria-busy=true]")).not_to_be_empty()
        sync_api.expect(page.locator("#experts rect")).to_have_count(16)
        animation = "getComputedStyle(document.getElementById('output'), '::after').animationName"
        assert page.evaluate(animation) == ("none" if motion == "reduce" else "blink")
        drawn = page.locator("#batch path").first.get_attribute("d")
        page.wait_for_timeout(1500)
        still = page.locator("#batch path").first.get_attribute("d") == drawn
        assert still == (motion == "reduce")
        page.keyboard.press("Escape")


def test_pictures(
    browser: sync_api.Browser, server: httpx.Client, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The page while requests of other clients come and go."""
    folder = request.config.getoption("--screenshots")
    seconds, tokens = (2, 8) if folder is None else (45, 45)
    folder = folder or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds

    def others(number: int) -> None:
        time.sleep(number * seconds / 8)
        while time.monotonic() < end:
            body = {"prompt": PROMPT, "max_tokens": tokens * (number + 1), "ignore_eos": True}
            assert server.post("/v1/completions", json={**body, "seed": number}).status_code == 200
            time.sleep(number * seconds / 20)

    with (
        opened(browser, server, viewport={"width": 1000, "height": 700}) as page,
        ThreadPoolExecutor(5) as pool,
    ):
        clients = [pool.submit(others, number) for number in range(5)]
        page.wait_for_timeout(seconds * 900)
        type_into(page, "prompt", PROMPT)
        type_into(page, "max-tokens", "120")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#output")).not_to_be_empty()
        page.wait_for_timeout(seconds * 60)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            picture = folder / f"page-{scheme}.png"
            page.screenshot(path=picture, full_page=True)
            assert 20_000 < picture.stat().st_size < PICTURE_BYTES
        page.keyboard.press("Escape")
        for client in clients:
            client.result()
