"""``State``: what a server is doing, as ``GET /state`` tells it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from specdec_ext.report import Decision
from specdec_ext.serve.service import Service


class State(BaseModel):
    """What a server is doing. Counters begin with the server.

    Attributes:
        model: the name under which clients ask for the model.
        chat: whether there is a chat template.
        drafter: class name of the drafter, or ``"none"``.
        speculation: ``"auto"`` if a controller chooses what to draft, ``"fixed"`` or ``"none"``.
        is_open: whether requests are accepted.
        uptime: seconds since the server began.
        running: number of requests that are being decoded.
        max_rows: the most of them.
        waiting: number of requests that wait.
        cached_tokens: number of tokens whose keys and values are kept for running requests.
        max_tokens: the most of them; null for no limit.
        prompt_tokens: number of tokens of prompts that were read.
        generation_tokens: number of tokens that were emitted.
        drafts: number of drafts that were verified.
        draft_tokens: number of drafted tokens.
        accepted_tokens: number of accepted drafted tokens.
        proposed_per_position: for each i, drafts that proposed a token at position i + 1.
        reached_per_position: those of them in which all tokens before were accepted.
        accepted_per_position: those of them whose token was accepted.
        steps: number of steps of all rows together, by the name of the drafted shape; of a controller only.
        probes: steps among them that tried something that was not in use.
        decision: what the controller chose last, and from what; null before that.
    """

    model: str
    chat: bool
    drafter: str
    speculation: Literal["auto", "fixed", "none"]
    is_open: bool
    uptime: float
    running: int
    max_rows: int
    waiting: int
    cached_tokens: int
    max_tokens: int | None
    prompt_tokens: int
    generation_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    proposed_per_position: list[int]
    reached_per_position: list[int]
    accepted_per_position: list[int]
    steps: dict[str, int]
    probes: int
    decision: Decision | None


def state_of(service: Service, uptime: float) -> State:
    """The state of a server that began ``uptime`` seconds ago."""
    engine, metrics, settings = service.engine, service.metrics, service.settings
    load, stats = engine.load, engine.stats()
    template = settings.chat_template or getattr(service.tokenizer, "chat_template", None)
    return State(
        model=settings.model_name,
        chat=template is not None,
        drafter=stats.drafter,
        speculation=stats.policy,
        is_open=engine.is_open,
        uptime=uptime,
        running=load.running,
        max_rows=load.max_rows,
        waiting=load.waiting,
        cached_tokens=load.cached_tokens,
        max_tokens=load.max_tokens,
        prompt_tokens=metrics.prompt_tokens,
        generation_tokens=metrics.generation_tokens,
        drafts=stats.drafts,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        # The engine's thread changes these while they are read here; a copy is made in one piece.
        proposed_per_position=list(stats.proposed_per_position),
        reached_per_position=list(stats.reached_per_position),
        accepted_per_position=list(stats.accepted_per_position),
        steps=dict(stats.shapes),
        probes=stats.probes,
        decision=engine.decision,
    )
