"""Errors that code tells apart by their type; their messages are for people and may change."""

from __future__ import annotations


class NotAcceleratedError(ValueError):
    """A model or an argument that only transformers' own decoding loop serves.

    The way out is ``model.generate``, which is ours while :func:`specdec_ext.install` is in effect.
    """


class CantJoinError(ValueError):
    """Requests of a model or with a drafter can't join a running batch.

    The way out is another drafter, or :class:`specdec_ext.engine.SerialEngine`.
    """


class EngineFullError(RuntimeError):
    """An engine already has as many waiting requests as it may have. The way out is to submit again later."""


class EngineClosedError(RuntimeError):
    """An engine takes no requests any more, because ``shutdown`` was called."""
