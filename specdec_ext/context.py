"""``Context``: the text of a call so far. The loop writes it and drafters read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_ext.models.base import CommittedKeys
from specdec_ext.ops.couple_logits import DraftNoise
from specdec_ext.transfer import Latest, Staged, Staging
from specdec_ext.tree.config import Shape


class Context:
    """The rows of a batch, each of which grows at its own pace.

    The columns of ``sequences`` are those of Hugging Face: the prompt with its paddings, then the generated
    tokens, padded on the right. *Active* rows are the unfinished ones. Every per-row tensor that a drafter
    returns has one entry per active row, in the order of ``rows``.

    Attributes:
        input_ids: ``[batch, columns]``, the prompt; has no columns if the prompt is given as embeddings only.
        attention_mask: ``[batch, offset + columns]``, 0 where the prompt is padding, or None.
        offset: number of prompt columns that are not in ``input_ids``, because only embeddings are known.
        rows: original row numbers of the active rows.
        generated: tokens emitted so far, per original row.
        max_length: number of columns at which every row ends.
        draw: ``draw(logits [n, vocab], positions, rows) -> [n]``, the tokens that the target would emit at
            these positions if it had these logits, with the same processing and the same noise. Drafts drawn
            this way agree with the target more often than independent samples.
        sample: ``sample(logits [n, vocab], depth, root_positions, rows) -> ([n], [n, vocab])``, independent
            draws at ``depth`` of a round's tree and the distributions that they were drawn from, for
            ``DraftTree.draft_probs``; see :meth:`specdec_ext.verify.sampler.Sampler.sample`.
        noise: the noise of the verification for all rows of the batch; drafters couple their drafts with it
            (:func:`specdec_ext.ops.couple_logits`). Its temperatures are those at which most drafts are
            accepted, somewhat lower than the call's. None if the call does not sample, or under rules 2 to 4,
            for which drafts must be independent of the noise.
        committed_keys: ``committed_keys(layer, reach)``, keys and values of the committed tokens in the
            target's cache; see :meth:`specdec_ext.models.base.Target.committed_keys`.
        staging: copies integers to the device of the target. All integers that are staged in a round travel
            in one copy.
        shape: the shape to draft in this step: one that the drafter offers
            (:meth:`specdec_ext.Drafter.shapes`), or None for the drafter's default.
    """

    shape: Shape | None = None

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pad_token_id: int,
        max_length: int,
        draw: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor],
        sample: Callable[[Tensor, int, Sequence[int], Sequence[int]], tuple[Tensor, Tensor]],
        offset: int = 0,
        encoder_ids: Tensor | None = None,
        staging: Staging | None = None,
        noise: DraftNoise | None = None,
        committed_keys: Callable[[int, int | None], CommittedKeys] | None = None,
    ):
        self.input_ids = input_ids
        self._encoder_ids = encoder_ids
        self.attention_mask = attention_mask
        self.offset = offset
        self.max_length = max_length
        self.draw, self.sample, self.noise = draw, sample, noise
        self.committed_keys = committed_keys
        self.staging = Staging(input_ids.device) if staging is None else staging
        self.rows = list(range(len(input_ids)))
        self._limits = [max_length - input_ids.shape[1]] * len(
            input_ids
        )  # tokens that a row may emit
        self.generated: list[list[int]] = [[] for _ in self.rows]
        self._prompt_lengths = (
            [offset + input_ids.shape[1]] * len(input_ids)
            if attention_mask is None
            else attention_mask.bool().sum(dim=1).tolist()
        )
        self._prompt_texts: list[list[int]] | None = None
        self._last_tokens = Latest(self.staging)
        self._pad = pad_token_id
        self._sequences = Sequences(input_ids, self.staging, pad_token_id, max_length)
        self._on_host: Sequences | None = None  # the same on the CPU

    @property
    def prompt_columns(self) -> int:
        return self.input_ids.shape[1]

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def roots(self) -> Tensor:
        """``[rows]``, the last token of each active row."""
        return self.last_tokens(self.rows)

    def last_tokens(self, rows: Sequence[int]) -> Tensor:
        """``[len(rows)]``, the last token of each of these original rows."""
        return self._staged_tokens(rows).tensor

    def _staged_tokens(self, rows: Sequence[int]) -> Staged:
        return self._last_tokens.of([self.generated[row][-1] for row in rows])

    def stage(self, roots: Tensor | None = None) -> None:
        """Begin a round: stage its roots for the first copy to the device, unless they are there already."""
        self._last_tokens.of([self.generated[row][-1] for row in self.rows], roots)

    @property
    def root_positions(self) -> list[int]:
        """Position of each active row's last token: the number of tokens before it, without paddings."""
        return [self._prompt_lengths[row] + len(self.generated[row]) - 1 for row in self.rows]

    @property
    def remaining(self) -> list[int]:
        """Number of tokens that each active row may still emit."""
        return [self._limits[row] - len(self.generated[row]) for row in self.rows]

    def columns(self, row: int) -> int:
        """Length of original row ``row`` in columns."""
        return self.prompt_columns + len(self.generated[row])

    def prompt(self, row: int) -> list[int]:
        """Prompt tokens of original row ``row`` without paddings; with embeddings, all of ``input_ids``."""
        if self._prompt_texts is None:
            texts = self.input_ids.tolist()
            if self.attention_mask is not None and not self.offset:
                masks = self.attention_mask.bool().tolist()
                texts = [
                    [token for token, kept in zip(text, mask, strict=True) if kept]
                    for text, mask in zip(texts, masks, strict=True)
                ]
            self._prompt_texts = texts
        return self._prompt_texts[row]

    def last_columns(self, width: int) -> list[int]:
        """For each row, which of the prompt's last ``width`` columns is the last one without padding."""
        if self.attention_mask is None:
            return [width - 1] * len(self.generated)
        valid = self.attention_mask[:, -width:].bool().cpu()
        return (valid * torch.arange(width, device="cpu")).argmax(dim=1).tolist()

    def source(self, row: int) -> list[int]:
        """Tokens that the encoder reads for original row ``row``, with paddings; [] without an encoder."""
        return [] if self._encoder_ids is None else self._encoder_ids[row].tolist()

    def text(self, row: int) -> list[int]:
        """All tokens of original row ``row`` so far, without paddings."""
        return self.prompt(row) + self.generated[row]

    def share(self, row: int, other: Context) -> None:
        """Let original row ``row`` be the only row of ``other``: both have the same text from now on."""
        self.generated[row] = other.generated[0]
        self._limits[row] = other._limits[0]
        self._prompt_lengths[row] = other._prompt_lengths[0]
        self.prompt(row)  # makes the list
        assert self._prompt_texts is not None
        self._prompt_texts[row] = other.prompt(0)
        self._last_tokens.forget()

    def emit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Append one token to each of these original rows."""
        for row, token in zip(rows, tokens, strict=True):
            self.generated[row].append(token)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens to one original row."""
        self.generated[row] += tokens

    def generated_column(self, column: int) -> Tensor:
        """``[batch]`` ids on the CPU of this column after the prompt; shorter rows are padded."""
        tokens = [row[column] if column < len(row) else self._pad for row in self.generated]
        return torch.tensor(tokens, device="cpu")

    def stage_text(self) -> None:
        """Begin a round whose processors read the text: stage the tokens that :meth:`sequences` lacks."""
        self._sequences.stage(self.generated)

    def sequences(self, width: int | None = None) -> Tensor:
        """``[batch, columns]`` ids up to the longest row (or ``width`` columns); shorter rows are padded."""
        return self._sequences.of(self.generated, width)

    def sequences_on_host(self) -> Tensor:
        """:meth:`sequences` on the CPU, without a wait for the device."""
        if not self.staging.waits:
            return self.sequences()
        if self._on_host is None:
            host = torch.device("cpu")
            ids = self.input_ids.to(host)
            self._on_host = Sequences(ids, Staging(host), self._pad, self.max_length)
        return self._on_host.of(self.generated)


class Sequences:
    """The columns of ``sequences`` on one device, which are written as the text grows.

    Args:
        prompt: ``[batch, columns]``, on the device.
        staging: copies integers to the device.
        pad: the token of columns without text.
        max_length: number of columns at which every row ends.
    """

    def __init__(self, prompt: Tensor, staging: Staging, pad: int, max_length: int):
        self._prompt_columns = prompt.shape[1]
        self._staging, self._pad, self._max_length = staging, pad, max_length
        self._ids = prompt
        self._written = [0] * len(prompt)  # tokens of each row that are in _ids or staged
        self._new: list[Staged] = []  # rows, columns and tokens that _ids lacks

    def stage(self, generated: Sequence[Sequence[int]]) -> None:
        """Stage the tokens of the rows that are new."""
        new = [
            (row, self._prompt_columns + column, tokens[column])
            for row, tokens in enumerate(generated)
            for column in range(self._written[row], len(tokens))
        ]
        if new:
            self._new.append(self._staging.stage([*zip(*new, strict=True)]))
            self._written = [len(tokens) for tokens in generated]

    def of(self, generated: Sequence[Sequence[int]], width: int | None = None) -> Tensor:
        """``[batch, columns]`` with these generated tokens, up to the longest row or ``width`` columns."""
        longest = self._prompt_columns + max(map(len, generated), default=0)
        if longest > self._ids.shape[1]:
            room = min(max(self._max_length, longest), longest + 256) - self._ids.shape[1]
            padding = self._ids.new_full((len(self._ids), room), self._pad)
            self._ids = torch.cat([self._ids, padding], dim=1)
        self.stage(generated)
        for staged in self._new:
            rows, columns, tokens = staged.tensor
            self._ids[rows, columns] = tokens
        self._new.clear()
        return self._ids[:, : longest if width is None else width]
