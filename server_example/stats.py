"""What the page plots: the differences of the metrics and of the experts' counts, twice a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

from server_example.client import EngineClient
from server_example.engine import EngineStoppedError
from server_example.host import Reading

SECONDS = 0.5


async def stats_events(engine: EngineClient) -> AsyncIterator[dict[str, str]]:
    """One event for each interval until the engine stops; nothing is read while nobody listens."""
    with suppress(EngineStoppedError):
        before: Reading = await engine.call("reading")
        while True:
            await asyncio.sleep(SECONDS)
            if not engine.alive:
                return  # The end of a drain must not wait for this stream.
            now: Reading = await engine.call("reading")
            yield {"data": json.dumps(_figures(engine.served.pages, before, now))}
            before = now


def _figures(pages: int, before: Reading, now: Reading) -> dict[str, object]:
    """Times are milliseconds; a mean is null if its interval had no step."""

    def added(name: str) -> float:
        return now.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)

    def mean(name: str, labels: str = "", scale: float = 1) -> float | None:
        count = added(f"{name}_count{labels}")
        return round(added(f"{name}_sum{labels}") / count * scale, 3) if count else None

    return {
        "decode_ms": mean("server_step_seconds", "/decode", 1000),
        "prefill_ms": mean("server_step_seconds", "/prefill", 1000),
        "batch_size": mean("server_batch_size"),
        "waiting": now.metrics["server_requests_waiting"],
        "pages_used": pages - now.metrics["server_pages_free"],
        "pages": pages,
        "tokens_per_second": round(added("server_generated_tokens_total") / (now.time - before.time), 1),
        "expert_tokens": [new - old for old, new in zip(before.experts, now.experts, strict=True)],
    }
