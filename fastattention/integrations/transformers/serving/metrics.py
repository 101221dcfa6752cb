"""Counters for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request

from fastattention.integrations.transformers.serving.engine import Engine

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """What a server counts. Each server has its own registry."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "fastattention_requests", "Requests by how they ended; 499: the client left.", ["endpoint", "status"],
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("fastattention_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.cached_tokens = Counter(
            "fastattention_cached_prompt_tokens", "Tokens of prompts that were found in the cache.", registry=registry
        )
        self.tokens = Counter("fastattention_generated_tokens", "Tokens generated.", registry=registry)
        self.first_token = Histogram(
            "fastattention_time_to_first_token_seconds", "From a request to its first token.", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.duration = Histogram(
            "fastattention_request_seconds", "From a request to its last token.", buckets=SECONDS, registry=registry
        )
        for name, text, read in (
            ("running", "Answers that are being generated.", lambda: engine.running),
            ("waiting", "Answers that have not begun.", lambda: engine.waiting),
            ("cache_usage", "Share of the cache's pages in use, 0 to 1.", lambda: engine.cache_usage),
        ):
            Gauge(f"fastattention_{name}", text, registry=registry).set_function(read)

    def count(self, request: Request, status: int) -> None:
        """Counts a request to a model once it has ended."""
        path = request.scope["path"]  # a malformed Host leaves request.url without one
        if path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):  # others are for the client to choose
            self._requests.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """All counters in Prometheus' format."""
        return generate_latest(self._registry)
