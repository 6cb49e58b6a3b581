"""``LanguageModel``: the memory of a language model, from its config alone.

The model is built on the meta device, where tensors have shapes but no data. Its parameters are counted, and
its passes are run to see what they write to the cache and what they need besides. So every architecture that
transformers knows is planned by its own code, not by formulas. Only the op that runs the layers of known
families on the CPU tells what it needs.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec_ext.models import Support, supports
from specdec_ext.models.cache.slot_cache import SlotCache
from specdec_ext.models.compat import cache_argument
from specdec_ext.models.passes.direct.direct_pass import DirectPass
from specdec_ext.models.passes.direct.reading import read_direct_pass
from specdec_ext.models.slots.prefill import COMPARED_COLUMNS, DIRECT_COLUMNS
from specdec_ext.planning.sizes.configs import ConfigFile
from specdec_ext.planning.sizes.formats import OwnFormat, WeightFormat, weight_format
from specdec_ext.planning.sizes.live_bytes import LiveBytes
from specdec_ext.pretrained import vocab_size

META = torch.device("meta")
# A published config without a dtype is assumed to be one of weights in this type.
USUAL_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights of a model.

    Attributes:
        embedding: of the input embedding.
        lm_head: of the output matrix; 0 if it is the embedding.
        rest: of everything else.
        unpacked: of the largest matrix in the model's dtype, if matrices are unpacked for a product; else 0.
    """

    embedding: int
    lm_head: int
    rest: int
    unpacked: int

    @property
    def total(self) -> int:
        return self.embedding + self.lm_head + self.rest


@dataclass(frozen=True)
class PassBytes:
    """Bytes that a pass needs beside the weights.

    Attributes:
        slots: keys and values of the pass.
        states: recurrent states of all rows.
        logits: of the output.
        work: everything else that is alive at the same time, at most.
    """

    slots: int
    states: int
    logits: int
    work: int


class LanguageModel:
    """A causal language model without weights.

    Args:
        config: its config.
        dtype: dtype of weights and activations.
        quantised: format of its matrices; None if they are in ``dtype``.
        source: its name in messages.
        device: "cpu" or "cuda".

    Attributes:
        parameters: number of parameters, before they are quantised.

    Raises:
        ValueError: for an architecture whose memory can't be planned, or layers that do not fit to
            ``quantised``; the message has the reason.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        quantised: WeightFormat | OwnFormat | None = None,
        source: str = "the model",
        device: str = "cuda",
    ):
        self.source, self.dtype, self.quantised = source, dtype, quantised
        self._device = device
        self._config = config
        self._model = _on_meta(config, dtype, source)
        self.parameters = sum(each.numel() for each in self._model.parameters())
        if isinstance(quantised, OwnFormat):
            try:
                quantised.install(self._model)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
        self.config: Any = self._model.config.get_text_config(decoder=True)
        self.support: Support = supports(self._model)
        if not self.support.by_slots:
            raise ValueError(
                f"the memory of {source} can't be planned, because transformers lays out its cache: "
                f"{'; '.join(self.support.reasons)}"
            )
        self.run = lru_cache(maxsize=None)(self._run)

    @classmethod
    def of(
        cls, file: ConfigFile, dtype: torch.dtype | str, quantisation: str, device: str
    ) -> LanguageModel:
        """The model of a config.json.

        Args:
            file: the config.
            dtype: dtype of weights and activations; "auto" for that of the config.
            quantisation: one of ``formats.NAMES``.
            device: "cpu" or "cuda".
        """
        try:
            config = AutoConfig.from_pretrained(file.path)
        except Exception as error:  # transformers raises many types for unknown configs
            raise ValueError(
                f"{file.source}: transformers can't read its config: {error}"
            ) from error
        if not isinstance(dtype, torch.dtype):
            if dtype != "auto":
                raise ValueError(f"dtype is {dtype!r}; expected a torch.dtype, or 'auto'")
            recorded = getattr(config.get_text_config(decoder=True), "dtype", None)
            dtype = recorded if isinstance(recorded, torch.dtype) else USUAL_DTYPE
        quantised = weight_format(quantisation, file.values, file.source, device)
        return cls(config, dtype, quantised, file.source, device)

    @property
    def vocab_size(self) -> int:
        return vocab_size(self._model)

    @property
    def max_positions(self) -> int | None:
        """The number of positions that the model was made for, if its config tells."""
        return getattr(self.config, "max_position_embeddings", None)

    @cached_property
    def weights(self) -> Weights:
        """Bytes of the weights; a shared weight counts once."""
        embedding, lm_head = (
            _matrices(module)
            for module in (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        )
        counted: dict[int, int] = {}
        largest = 0
        for name, module in self._model.named_modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or id(tensor) in counted:
                    continue
                counted[id(tensor)] = tensor.nbytes
                bits = self._bits(name, module, tensor)
                if bits is not None and id(tensor) not in lm_head:
                    counted[id(tensor)] = round(tensor.numel() * bits / 8)
                    largest = max(largest, tensor[0].nbytes if tensor.ndim > 2 else tensor.nbytes)
        of_embedding = sum(counted[each] for each in embedding)
        of_lm_head = sum(counted[each] for each in lm_head - embedding)
        unpacks = isinstance(self.quantised, WeightFormat) and self.quantised.unpacks
        rest = sum(counted.values()) - of_embedding - of_lm_head
        return Weights(of_embedding, of_lm_head, rest, largest * unpacks)

    @property
    def has_plain_lm_head(self) -> bool:
        """Whether the output matrix is one of numbers, which a draft head can share, and not of codes."""
        weight = getattr(self._model.get_output_embeddings(), "weight", None)
        return isinstance(weight, torch.Tensor)

    def _bits(self, name: str, module: nn.Module, tensor: torch.Tensor) -> float | None:
        """Bits per weight of a tensor of which the format tells no more; None if it is as in the model."""
        found = self.quantised
        if not isinstance(found, WeightFormat) or found.keeps(name):
            return None
        is_matrix = isinstance(tensor, nn.Parameter) and tensor.ndim >= 2
        return found.bits if is_matrix and not isinstance(module, nn.Embedding) else None

    @cached_property
    def _direct(self) -> DirectPass | None:
        """How the CPU runs the layers of known families; None for others."""
        return read_direct_pass(self._model) if self._device == "cpu" else None

    def _run(self, rows: int, tokens: int, whole: bool = False) -> PassBytes:
        """Passes over ``tokens`` tokens of each row, from an empty cache; results are kept."""
        if self._direct is None:
            return self._by_modules(rows, tokens, whole)
        # The first draft is scored in both ways. So are two parts of a prompt, unless modules read all of it.
        part = tokens if whole else min(tokens, COMPARED_COLUMNS)
        passed = self._by_modules(rows, tokens, whole, part)
        work = self._direct.work_bytes(rows, min(tokens, DIRECT_COLUMNS), tokens)
        tables = self._direct.table_bytes(tokens)
        return replace(passed, work=max(passed.work, work) + tables)

    def _by_modules(
        self, rows: int, tokens: int, whole: bool = False, part: int | None = None
    ) -> PassBytes:
        """Run a pass from an empty cache.

        Args:
            rows: number of rows.
            tokens: number of tokens of each row.
            whole: whether the logits of all tokens are needed, not only those of the last one.
            part: number of tokens at the beginning and at the end that are read, each in a pass; None for all
                tokens in one pass.

        Raises:
            ValueError: if the values of tensors, which the meta device does not have, decide the pass.
        """
        parameters = inspect.signature(self._model.forward).parameters
        cache = SlotCache(None, self.config)
        cache.reserve(tokens, 0)
        arguments: dict[str, Any] = {cache_argument(parameters) or "": cache.cache}
        if "logits_to_keep" in parameters:
            arguments["logits_to_keep"] = 0 if whole else 1
        part = part or tokens
        ids = torch.zeros(rows, part, dtype=torch.long, device=META)
        known = [*self._model.parameters(), *self._model.buffers(), ids]
        try:
            with torch.inference_mode(), META, LiveBytes(known) as live:
                for begin in sorted({0, tokens - part}):
                    cache.set_length(begin, 0)
                    output = self._model(input_ids=ids, use_cache=True, **arguments)
        except (RuntimeError, NotImplementedError) as error:
            if self.dtype != USUAL_DTYPE:
                return self._scaled(rows, tokens, whole)
            raise ValueError(
                f"the memory of {self.source} can't be planned, because its passes depend on the values of "
                f"tensors: {str(error).partition(chr(10))[0]}"
            ) from error
        cache.take_layers()
        slots = sum(buffer.nbytes for buffer in cache.buffers(rows))
        states, logits = cache.states.num_bytes, output.logits.nbytes
        work = live.peak - slots - states - logits
        return PassBytes(slots, states, logits, max(0, work) + self.weights.unpacked)

    def _scaled(self, rows: int, tokens: int, whole: bool) -> PassBytes:
        """A pass in bfloat16, scaled: the meta device knows the products of experts only in that type."""
        scale = self.dtype.itemsize / USUAL_DTYPE.itemsize
        other = LanguageModel(self._config, USUAL_DTYPE, self.quantised, self.source, self._device)
        return PassBytes(*(round(scale * each) for each in astuple(other.run(rows, tokens, whole))))

    def slots(self, rows: int, slots: int) -> int:
        """Bytes of the keys and values of ``slots`` slots in each of ``rows`` rows."""
        return rows * slots * self.bytes_per_slot

    @cached_property
    def bytes_per_slot(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        tokens = 8
        return self.run(1, tokens).slots // tokens

    def states(self, rows: int) -> int:
        """Bytes of the recurrent states of ``rows`` rows, with the copies for rejected drafts."""
        return 2 * rows * self.run(1, 8).states


def _matrices(module: nn.Module | None) -> set[int]:
    """The ids of the tensors of a module that stand for its matrix: the weight, or codes with scales."""
    if module is None:
        return set()
    weight = getattr(module, "weight", None)
    tensors = [weight] if isinstance(weight, torch.Tensor) else [*module.buffers()]
    return {id(each) for each in tensors}


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype, source: str) -> PreTrainedModel:
    config = deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the model is built as it is before it is quantised
    build: Any = AutoModelForCausalLM.from_config
    try:
        with META:
            model: PreTrainedModel = build(config, dtype=dtype)
    except Exception as error:  # transformers raises many types for configs that it can't build
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{source} is no causal language model of transformers: {first}"
        ) from error
    return model.eval()
