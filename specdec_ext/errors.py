"""Errors that code tells apart by their type; their messages are for people and may change."""

from __future__ import annotations


class NotAcceleratedError(ValueError):
    """A model or an argument that only transformers' own decoding loop serves.

    The way out is ``model.generate``, which is ours while :func:`specdec_ext.install` is in effect.
    """
