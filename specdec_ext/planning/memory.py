"""``plan``: the memory that a target needs with a drafter, from configs alone, and what fits on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from specdec_ext.decoding.preparation import BLOCK_SLOTS
from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import byte_size, counted
from specdec_ext.drafters.draft_model import DEFAULT_DRAFT_TOKENS
from specdec_ext.drafters.heads.bound_head import draft_dtype
from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.medusa import MedusaConfig
from specdec_ext.models.cache.layers import GROWTH
from specdec_ext.models.graphs import arena
from specdec_ext.models.slots.target import FIRST_SLOTS, RECORDING_DEVICES
from specdec_ext.ops.draft_limits import default_weights
from specdec_ext.ops.quantise import weight_dtype
from specdec_ext.planning.capacity import Capacity, capacity_of
from specdec_ext.planning.sizes.configs import ConfigFile
from specdec_ext.planning.sizes.head import HeadMemory
from specdec_ext.planning.sizes.language_model import LanguageModel, PassBytes
from specdec_ext.preflight.extras import require
from specdec_ext.tree.config import TreeConfig

# The share of a device's memory that is planned with. The rest is for the driver's context, the libraries'
# own work space and gaps between tensors.
DEFAULT_SHARE = 0.9
GIB = 1 << 30
# The longest context is found to this number of tokens.
CONTEXT_STEP = 256
# Largest factor between two numbers that are tried in the search for the largest one.
_FASTEST = 16
_PROCESSED = torch.float32
# A draft model of 1B parameters for comparison: the shape of Llama-3.2-1B, with the target's vocabulary.
_ONE_B = dict(
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=8192,
    tie_word_embeddings=True,
)
ONE_B_NAME = "a 1B draft model"


@dataclass(frozen=True)
class Part:
    """Memory that stays for the whole call.

    Attributes:
        name: what it is.
        num_bytes: its size.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Phase:
    """Memory that one phase of a call needs in addition to the parts that exist then.

    Attributes:
        name: the phase.
        held: sum of the parts that exist in this phase.
        needs: name -> bytes of what only this phase needs.
    """

    name: str
    held: int
    needs: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return self.held + sum(self.needs.values())


@dataclass(frozen=True)
class Weighed:
    """A drafter in the comparison: its weights, and its cache at the rows and the context of the plan."""

    name: str
    weights: int
    cache: int


@dataclass(frozen=True, repr=False)
class MemoryPlan(Summarised):
    """The result of :func:`plan`. Sizes are in bytes.

    Attributes:
        target, draft: their names; ``draft`` is None without one.
        settings: dtype, formats, rows, context, new tokens, shape of the draft, device.
        parts: what stays for the whole call.
        shared: name -> size of the weights of the target that the draft head uses without a copy.
        phases: the phases of a call; the largest one decides.
        compared: the drafter beside a draft model of 1B parameters; empty without a draft head.
        capacity: the device; None if none was given.
        share: the share of its memory that is planned with.
        largest_rows: most rows that fit with this context; 0 if not even one does, None without a device.
        largest_context: longest context that fits with these rows, limited by the target's positions; a
            multiple of ``CONTEXT_STEP``, 0 if not even the new tokens fit.
    """

    target: str
    draft: str | None
    settings: Mapping[str, Any]
    parts: tuple[Part, ...]
    shared: Mapping[str, int]
    phases: tuple[Phase, ...]
    compared: tuple[Weighed, ...] = ()
    capacity: Capacity | None = None
    share: float = DEFAULT_SHARE
    largest_rows: int | None = None
    largest_context: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes that the call needs at most."""
        return self.peak.num_bytes

    @property
    def available(self) -> int | None:
        """The share of the device's memory that is planned with; None without a device."""
        return None if self.capacity is None else int(self.share * self.capacity.num_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the call fits on the device; None without a device."""
        return None if self.available is None else self.num_bytes <= self.available

    def summary(self) -> str:
        drafter = "no draft model" if self.draft is None else self.draft
        needs = f"{self.target} with {drafter} needs {byte_size(self.num_bytes)}"
        if self.capacity is None or self.available is None:
            return needs
        spare = self.available - self.num_bytes
        where = f"{self.share:.0%} of {self.capacity.name}, {byte_size(self.available)}"
        if spare >= 0:
            return f"{needs} and fits into {where}; {byte_size(spare)} are left"
        return f"{needs} and does not fit into {where}; {byte_size(-spare)} are missing"

    def sentences(self) -> Iterable[str]:
        yield f"{self.summary()}."
        peak = self.peak
        yield (
            f"The peak is in the phase '{peak.name}': {byte_size(peak.held)} are held then, and "
            f"{byte_size(peak.num_bytes - peak.held)} are needed for the phase."
        )
        if self.largest_rows is not None:
            rows, context = self.settings["rows"], self.settings["context"]
            yield (
                f"Largest number of rows with a context of {context:,} tokens: {self.largest_rows:,}. "
                f"Longest context with {counted(rows, 'row')}: {self.largest_context or 0:,} tokens."
            )
        yield from self.notes

    def tables(self) -> Iterable[Table]:
        settings = [(name, str(value)) for name, value in self.settings.items()]
        yield Table(settings, title="planned for")
        rows = [(part.name, byte_size(part.num_bytes)) for part in self.parts]
        rows += [
            (f"shared with the target: {name}", f"({byte_size(size)})")
            for name, size in self.shared.items()
        ]
        yield Table(rows, ("part", "memory"), "memory by part")
        needs = [
            (phase.name, what, byte_size(size))
            for phase in self.phases
            for what, size in [*phase.needs.items(), ("in all", phase.num_bytes)]
        ]
        peak = next(
            index
            for index, (name, what, _) in enumerate(needs)
            if (name, what) == (self.peak.name, "in all")
        )
        yield Table(needs, ("phase", "needs", "memory"), "memory by phase", marked=[peak])
        if self.compared:
            compared = [
                (each.name, byte_size(each.weights), byte_size(each.cache))
                for each in self.compared
            ]
            yield Table(compared, ("drafter", "own weights", "own cache"), "compared")

    def plot(self, path: str | Path) -> None:
        """Save the parts and the needs of the largest phase as a stacked bar in an image file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        otherwise = "MemoryPlan.explain() shows the same as text"
        figures = require("matplotlib.figure", "MemoryPlan.plot", otherwise)
        figure = figures.Figure(figsize=(10, 3), layout="constrained")
        ax, end = figure.subplots(), 0.0
        needs = [(f"{what} ({self.peak.name})", size) for what, size in self.peak.needs.items()]
        for name, size in [*((part.name, part.num_bytes) for part in self.parts), *needs]:
            ax.barh([0], [size / GIB], left=end, label=f"{name}, {byte_size(size)}")
            end += size / GIB
        if self.available is not None:
            ax.axvline(self.available / GIB, color="black", linewidth=1)
        ax.set_yticks([])
        ax.set(xlabel="GiB", title=str(self))
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
        figure.savefig(path)

    def record(self) -> dict[str, Any]:
        """The whole plan, for JSON."""
        return {
            **asdict(self),
            "num_bytes": self.num_bytes,
            "available": self.available,
            "fits": self.fits,
        }


def plan(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    context: int = 4096,
    rows: int = 1,
    new_tokens: int = 256,
    tree: TreeConfig | None = None,
    dtype: torch.dtype | str = "auto",
    quantisation: str = "auto",
    draft_quantisation: str = "auto",
    do_sample: bool = False,
    memory: str | int | None = None,
    share: float = DEFAULT_SHARE,
    device: str = "cuda",
    graphs: bool = True,
) -> MemoryPlan:
    """Plan the memory of a call of :func:`specdec_ext.generate` without loading a model.

    Parameters are counted, and the passes of the prompt and of a step are run, on the meta device, which
    knows shapes only. Weights that :func:`specdec_ext.quantize` made are counted layer by layer;
    those of other libraries' formats are counted as the config describes them.

    Args:
        target: folder, config.json, or hub id, of which only the config is downloaded.
        draft: the same for a draft head or a draft model; None for drafters without weights.
        context: tokens of each row, prompt and new tokens together.
        rows: number of rows.
        new_tokens: tokens of ``context`` that are generated.
        tree: shape of a draft; None for the drafter's default, or for plain decoding without ``draft``.
        dtype: dtype of weights and activations; "auto" for that of the target's config.
        quantisation: format of the target's matrices: "none", "float8", "int8", "int4", or "auto" for that of
            its config. On the CPU, "int8" and "int4" are the formats of :func:`specdec_ext.quantize`, and
            "int4:128" and "int4:128:offsets" those with its ``group_size`` and without ``symmetric``.
        draft_quantisation: the same for a draft model; for a head "none", "int8", on a GPU also "float8", or
            "auto" for the default of :class:`~specdec_ext.HeadDrafter`.
        do_sample: whether the text is sampled, which needs processed scores in float32.
        memory: a GPU such as "H100", a MIG profile such as "3g.40gb", or a size ("24GiB", or a number of
            bytes); None to plan for no device.
        share: share of ``memory`` to plan with.
        device: "cuda" or "cpu".
        graphs: whether passes are recorded on a GPU (``generate(graphs=...)``).

    Raises:
        OSError: for a path or hub id that does not exist.
        ValueError: for an argument out of its range, or a model whose memory can't be planned.
    """
    capacity = None if memory is None else capacity_of(memory)
    if not 1 <= new_tokens < context:
        raise ValueError(
            f"new_tokens is {new_tokens} and context {context}; expected at least one new token, after at "
            "least one token of the prompt"
        )
    if rows < 1 or not 0 < share <= 1:
        raise ValueError(f"rows is {rows} and share {share}; expected rows >= 1 and 0 < share <= 1")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device is {device!r}; expected 'cuda' or 'cpu'")
    model = LanguageModel.of(ConfigFile.find(target), dtype, quantisation, device)
    place = torch.device(device)
    drafter = _drafter(draft, model, place, draft_quantisation)
    calls = _Calls(model, drafter, place, new_tokens, tree, do_sample, graphs)
    phases = calls.phases(rows, context)
    compared: tuple[Weighed, ...] = ()
    if isinstance(drafter, HeadMemory):
        compared = calls.compared(str(draft), rows, context)
    found: tuple[int | None, int | None] = None, None
    if capacity is not None:
        available = int(share * capacity.num_bytes)
        least = 1 + new_tokens // CONTEXT_STEP
        limit = model.max_positions
        most = None if limit is None else max(limit // CONTEXT_STEP, least)
        found = (
            largest(lambda count: calls.num_bytes(count, context), available, 1),
            CONTEXT_STEP
            * largest(
                lambda steps: calls.num_bytes(rows, CONTEXT_STEP * steps), available, least, most
            ),
        )
    shape = calls.tree(rows)
    settings = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": model.quantised.name if model.quantised else "none",
        "rows": rows,
        "context": context,
        "new tokens": new_tokens,
        "draft": "none" if shape is None else str(shape),
        "device": device,
    }
    return MemoryPlan(
        str(target),
        None if draft is None else str(draft),
        settings,
        tuple(calls.parts(rows, context)),
        drafter.shared if isinstance(drafter, HeadMemory) else {},
        tuple(phases),
        compared,
        capacity,
        share,
        *found,
        tuple(_notes(model, context)),
    )


def _notes(model: LanguageModel, context: int) -> Iterable[str]:
    if model.max_positions is not None and context > model.max_positions:
        yield f"{model.source} was made for {model.max_positions:,} positions only."


def _drafter(
    draft: str | Path | None, target: LanguageModel, device: torch.device, quantisation: str
) -> HeadMemory | LanguageModel | None:
    if draft is None:
        return None
    file = ConfigFile.find(draft)
    config = file.head()
    if config is None:
        return LanguageModel.of(file, target.dtype, quantisation, device.type)
    formats = {"auto": "same", "none": "same"}
    if isinstance(config, HeadConfig):
        formats["auto"] = default_weights(device, draft_dtype(device, target.dtype))
    format_ = formats.get(quantisation, quantisation)
    matrices = weight_dtype(format_)
    if matrices is not None and isinstance(config, MedusaConfig):
        raise ValueError(
            f"draft_quantisation={quantisation!r}, but Medusa heads keep the target's dtype; pass 'none'"
        )
    if format_ == "float8" and device.type == "cpu":
        raise ValueError(
            "draft_quantisation='float8' is for GPUs; pass 'int8' or 'none' for a head on the CPU"
        )
    head = HeadMemory(config, target, device, matrices)
    head.check(file.source)
    return head


@dataclass(frozen=True)
class _Calls:
    """The memory of calls with one target and one drafter, by number of rows and context."""

    target: LanguageModel
    drafter: HeadMemory | LanguageModel | None
    device: torch.device
    new_tokens: int
    shape: TreeConfig | None
    do_sample: bool
    graphs: bool

    def tree(self, rows: int) -> TreeConfig | None:
        """The shape that is drafted; None for plain decoding."""
        if self.shape is not None or self.drafter is None:
            return self.shape
        if isinstance(self.drafter, HeadMemory):
            return self.drafter.default_tree(rows)
        return TreeConfig(depth=DEFAULT_DRAFT_TOKENS)

    def _nodes(self, rows: int) -> int:
        tree = self.tree(rows)
        return 1 if tree is None else tree.num_draft_tokens + 1

    def parts(self, rows: int, context: int) -> list[Part]:
        """What stays for the whole call."""
        target, drafter = self.target, self.drafter
        slots = slots_of(context - self.new_tokens, self.new_tokens, self._nodes(rows))
        parts = [
            Part("target: embedding", target.weights.embedding),
            Part("target: lm_head", target.weights.lm_head),
            Part("target: other weights", target.weights.rest),
            Part("target: keys and values", target.slots(rows, slots)),
            Part("target: recurrent states", target.states(rows)),
        ]
        if self.graphs and self.device.type in RECORDING_DEVICES:
            recorded = -(-(context + BLOCK_SLOTS) // arena.SLOTS) * arena.SLOTS
            parts.append(Part("target: arena of recorded passes", target.slots(rows, recorded)))
        if drafter is not None:
            parts += [
                Part("draft: own weights", _weights(drafter)),
                Part("draft: keys and values", self._draft_cache(drafter, rows, context)),
            ]
        return [part for part in parts if part.num_bytes]

    def _draft_cache(self, drafter: HeadMemory | LanguageModel, rows: int, context: int) -> int:
        tree = self.tree(rows)
        assert tree is not None
        if isinstance(drafter, HeadMemory):
            return drafter.cache(rows, context, tree)
        slots = slots_of(context - self.new_tokens, self.new_tokens, tree.depth)
        return drafter.slots(rows, slots) + drafter.states(rows)

    def phases(self, rows: int, context: int) -> list[Phase]:
        """The phases of a call."""
        drafter, prompt = self.drafter, context - self.new_tokens
        held = sum(part.num_bytes for part in self.parts(rows, context))
        later = 0 if drafter is None else self._draft_cache(drafter, rows, context)
        read = _activations(self.target.run(rows, prompt))
        block = self.target.run(rows, self._nodes(rows), True)
        step = {"logits of a block": block.logits, "work space": block.work}
        if self.do_sample:
            scores = block.logits // self.target.dtype.itemsize * _PROCESSED.itemsize
            step["processed scores"] = scores
        between = []
        if isinstance(drafter, HeadMemory):
            features = {"aux hidden states": drafter.features(rows, prompt)}
            read |= features
            reads = {**features, "their concatenation": features["aux hidden states"]}
            between.append(Phase("the head reads the prompt", held, reads))
            step["aux hidden states"] = drafter.pending(rows)
        elif drafter is not None:
            own = drafter.run(rows, self._nodes(rows), True)
            reads = _activations(drafter.run(rows, prompt))
            between.append(Phase("the draft model reads the prompt", held, reads))
            step["work space"] = max(block.work, own.work + own.logits)
        first = Phase("the target reads the prompt", held - later, read)
        return [first, *between, Phase("a step", held, step)]

    def num_bytes(self, rows: int, context: int) -> int:
        """Bytes that a call needs at most."""
        return max(phase.num_bytes for phase in self.phases(rows, context))

    def compared(self, name: str, rows: int, context: int) -> tuple[Weighed, ...]:
        """The drafter beside a draft model of 1B parameters in the target's dtype."""
        assert self.drafter is not None
        config = AutoConfig.for_model("llama", vocab_size=self.target.vocab_size, **_ONE_B)
        other = LanguageModel(config, self.target.dtype, source=ONE_B_NAME)
        return tuple(
            Weighed(each, _weights(drafter), self._draft_cache(drafter, rows, context))
            for each, drafter in ((name, self.drafter), (ONE_B_NAME, other))
        )


def _activations(read: PassBytes) -> dict[str, int]:
    """What a pass over the prompt needs; its logits are those of the last token."""
    return {"work space": read.work + read.logits}


def _weights(drafter: HeadMemory | LanguageModel) -> int:
    return drafter.weights if isinstance(drafter, HeadMemory) else drafter.weights.total


def slots_of(prompt: int, new_tokens: int, nodes: int) -> int:
    """The number of cache slots of a row at the end of a call, as ``SlotTarget`` reserves them.

    Args:
        prompt: tokens of the prompt.
        new_tokens: tokens that are generated.
        nodes: nodes of a draft.
    """
    slots = min(prompt + new_tokens + BLOCK_SLOTS, prompt + FIRST_SLOTS)
    while slots < prompt + new_tokens + nodes - 1:
        slots += 1 + max(GROWTH, (slots + 1) // 4)
    return slots


def largest(
    needed: Callable[[int], int], available: int, least: int, most: int | None = None
) -> int:
    """The largest number that needs no more than what is available; 0 if even ``least`` needs more.

    Args:
        needed: bytes that a number needs, which must not fall. It is slow, and almost a straight line.
        available: bytes.
        least, most: the smallest and the largest number to consider; None for no limit.
    """
    needed = lru_cache(maxsize=None)(needed)
    if needed(least) > available:
        return 0
    if most is not None and needed(most) <= available:
        return most

    def crossing(low: int, high: int) -> float:
        """Where the line through both points reaches what is available, as a share of their distance."""
        return (available - needed(low)) / max(needed(high) - needed(low), 1)

    low, high = least, 2 * least
    while needed(high) <= available:
        beyond = low + int((high - low) * crossing(low, high) * 1.1) + 1
        low, high = high, min(max(beyond, 2 * high), _FASTEST * high)
    for turn in count():
        if high - low <= 1:
            break
        # Halves from time to time: on a curve, one end would approach the crossing very slowly.
        share = 0.5 if turn % 3 == 2 else crossing(low, high)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (middle, high) if needed(middle) <= available else (low, middle)
    return low
