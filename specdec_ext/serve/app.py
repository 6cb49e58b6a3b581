"""The web application: its endpoints."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

import specdec_ext
from specdec_ext.engine import AnyEngine
from specdec_ext.serve import chat, completions
from specdec_ext.serve.http.errors import ApiError, ErrorBody, answer_errors
from specdec_ext.serve.http.guards import BodyGuard, KeyGuard
from specdec_ext.serve.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from specdec_ext.serve.http.sse import EventStream, answer_while_connected
from specdec_ext.serve.page import add_page
from specdec_ext.serve.service import Service, Settings

_CLIENT_LEFT = 499  # nobody reads it; the status that nginx logs


def create_app(engine: AnyEngine, settings: Settings) -> FastAPI:
    """The application for an engine.

    Args:
        engine: an engine with a tokenizer. The application shuts it down when it ends itself, after all
            requests that were accepted.
        settings: the options of the server.
    """
    service = Service(engine, settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.shutdown()

    app = FastAPI(
        title="specdec_ext",
        version=specdec_ext.__version__,
        lifespan=life,
        docs_url=None,  # a page that fetches scripts from elsewhere
        redoc_url=None,
        responses={status: {"model": ErrorBody} for status in ("4XX", "5XX")},
    )
    answer_errors(app)
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, key=settings.api_key)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_operations(app, service)
    add_page(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    async def answered(
        request: Request, source: chat.ChatAnswer | completions.CompletionAnswer
    ) -> Response:
        answer = source.answer
        headers = {"X-Request-Id": answer.id}
        if answer.body.stream:
            return EventStream(source.chunks(), headers, answer.close)
        try:
            text = await answer_while_connected(request, source.whole())
        except ApiError as error:
            return error.response()
        finally:
            answer.close()
        if text is None:
            return Response(status_code=_CLIENT_LEFT)
        return Response(text, media_type="application/json", headers=headers)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Reply to the messages of a chat."""
        return await answered(request, await chat.start(service, body))

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await answered(request, await completions.start(service, body))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt, or of the messages of a chat."""
        service.check_model(body.model)
        if body.messages:
            work = (chat.prompt_of, service, body.messages, body.tools, body.chat_template_kwargs)
        else:
            special = body.add_special_tokens is not False
            work = (service.encode, body.prompt, special, "prompt")  # type: ignore[assignment]
        ids: list[int] = await service.aside(*work)
        answer = {"count": len(ids), "max_model_len": service.engine.max_length, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = service.tokenizer.convert_ids_to_tokens(ids)
        return answer

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens, special ones included."""
        service.check_model(body.model)
        service.check_ids(body.tokens, "tokens")
        return {"prompt": await service.aside(service.tokenizer.decode, body.tokens)}


def _add_operations(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model of this server."""
        model = {
            "id": service.settings.model_name,
            "object": "model",
            "created": created,
            "owned_by": "specdec_ext",
            "max_model_len": service.engine.max_length,
        }
        return {"object": "list", "data": [model]}

    @app.get("/pair")
    async def pair() -> dict[str, Any]:
        """The files of target and draft by their hashes, as ``pair.lock`` has them."""
        return await service.pair()

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether requests are accepted: 200, or 503."""
        if service.engine.is_open:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "shutting down"}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics for Prometheus."""
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)
