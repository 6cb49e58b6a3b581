"""``Completer``: completes the prompts of a data set in batches of rows; a class for Ray Data's actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_ext.cluster.options import EngineOptions
from specdec_ext.engine import Handle
from specdec_ext.training.data.records import checked_text

TEXT, TOKENS, REASON, ERROR = "text", "completion_tokens", "finish_reason", "error"
COLUMNS = (TEXT, TOKENS, REASON, ERROR)


class Completer:
    """Completes the prompts in a column of a batch of rows, with one engine for all batches.

    For ``ray.data.Dataset.map_batches``, which makes one completer in each actor::

        completed = dataset.map_batches(
            Completer,
            fn_constructor_args=["bundled"],
            fn_constructor_kwargs={"max_new_tokens": 64},
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=64,
        )

    Rows keep their columns and get four more: ``text``, ``completion_tokens``, ``finish_reason`` and
    ``error``. The text of a row is that of :func:`specdec_ext.generate` for it alone, whatever else is in its
    batch. A row that can't be completed has no text and an ``error``; other rows are completed. In each batch
    as many rows as the engine has run at a time, so batches should have several times as many.

    Args:
        options: how to load the model, or its name for the default options.
        column: name of the column of prompts, texts that are not empty.
        seed_column: name of a column of seeds, one int for each row; None if there is none.
        **request: arguments of :meth:`specdec_ext.Engine.submit` for every row, such as ``max_new_tokens``,
            ``do_sample``, ``temperature`` and ``seed``.

    Raises:
        OSError, ValueError: as :meth:`EngineOptions.start`, or for a request that is wrong for any prompt.
    """

    def __init__(
        self,
        options: EngineOptions | str,
        *,
        column: str = "prompt",
        seed_column: str | None = None,
        **request: Any,
    ):
        if seed_column is not None and "seed" in request:
            raise ValueError("seed_column and seed are given; pass one of them")
        if isinstance(options, str):
            options = EngineOptions(options)
        self._engine = options.start()
        self._tokenizer: Any = self._engine.tokenizer
        self._column, self._seed_column, self._request = column, seed_column, request
        self._check_request()

    def _check_request(self) -> None:
        """Refuse a request that is wrong for any prompt, before an error is written to every row."""
        handle = self._engine.submit([0], **self._request)
        handle.cancel()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a batch.

        Args:
            batch: columns, ``[rows]`` arrays or sequences (``batch_format="numpy"``, Ray's default).

        Returns:
            The columns, and ``text``, ``completion_tokens``, ``finish_reason`` and ``error``, ``[rows]``.

        Raises:
            KeyError: a column is missing.
            ValueError: the batch has one of the new columns already.
            TypeError: the batch is not a mapping of columns.
        """
        prompts, seeds = self._columns(batch)
        begun = [self._begin(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        ended = [self._end(each) for each in begun]
        new = {name: [row[name] for row in ended] for name in COLUMNS}
        dtypes = {TOKENS: np.int64}
        return {
            **batch,
            **{name: np.array(new[name], dtypes.get(name, object)) for name in COLUMNS},
        }

    def _columns(self, batch: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"the batch is a {type(batch).__name__}; expected a mapping of columns: leave batch_format "
                "out, or pass batch_format='numpy'"
            )
        for name in (self._column, self._seed_column):
            if name is not None and name not in batch:
                raise KeyError(f"the data set has no column {name!r}; it has {sorted(batch)}")
        if taken := [name for name in COLUMNS if name in batch]:
            raise ValueError(
                f"the data set has the columns {taken} already, which are those of the answers; rename them"
            )
        prompts = batch[self._column]
        seeds = [None] * len(prompts) if self._seed_column is None else batch[self._seed_column]
        return prompts, seeds

    def _begin(self, prompt: Any, seed: Any) -> Handle | ValueError:
        """A running request, or the error for one that can't be honoured."""
        request = dict(self._request)
        try:
            text = checked_text(prompt, f"column {self._column!r}")
            if seed is not None:
                request["seed"] = int(seed)
            return self._engine.submit(self._tokenizer(text)["input_ids"], **request)
        except (TypeError, ValueError) as error:
            return ValueError(str(error))

    def _end(self, begun: Handle | ValueError) -> dict[str, Any]:
        """The new columns of a row.

        Raises:
            Exception: the engine has ended, so that no further row can be completed.
        """
        if isinstance(begun, Handle):
            try:
                tokens = begun.result()
            except Exception as error:
                if not self._engine.is_open:
                    raise
                begun = ValueError(f"{type(error).__name__}: {error}")
            else:
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                return {
                    TEXT: text,
                    TOKENS: len(tokens),
                    REASON: begun.finish_reason,
                    ERROR: "",
                }
        return {TEXT: "", TOKENS: 0, REASON: "error", ERROR: str(begun)}
