"""What the page plots: the differences of the metrics and of the experts' counts, twice a second."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

from server_example.client import EngineClient
from server_example.messages import EngineUnavailableError, Reading

logger = logging.getLogger(__name__)

SECONDS = 0.5
#: The most events that wait for a listener. A listener that reads more slowly misses the oldest.
_MOST_WAITING = 20


class Stats:
    """One reader of the engine for all listeners. It reads nothing while nobody listens."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[str | None]] = set()
        self._reader: asyncio.Task[None] | None = None

    async def events(self, engine: EngineClient) -> AsyncIterator[dict[str, str]]:
        """One event for each interval until the engine stops."""
        listener: asyncio.Queue[str | None] = asyncio.Queue(_MOST_WAITING)
        self._listeners.add(listener)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(engine))
        try:
            while (figures := await listener.get()) is not None:
                yield {"data": figures}
        finally:
            self._listeners.remove(listener)
            if not self._listeners:
                self._reader.cancel()
                self._reader = None

    async def _read(self, engine: EngineClient) -> None:
        try:
            before: Reading = await engine.call("reading")
            while True:
                await asyncio.sleep(SECONDS)
                if not engine.alive:
                    break  # The end of a drain must not wait for these streams.
                now: Reading = await engine.call("reading")
                self._tell(json.dumps(_figures(engine.served.pages, before, now)))
                before = now
        except EngineUnavailableError:
            pass
        except Exception:
            logger.exception("the engine's figures cannot be read")
        self._tell(None)

    def _tell(self, figures: str | None) -> None:
        for listener in self._listeners:
            if listener.full():
                listener.get_nowait()
            listener.put_nowait(figures)


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
