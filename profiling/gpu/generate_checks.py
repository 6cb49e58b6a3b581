"""Check ``generate`` on a device: every kind of drafter gives the text that the model alone gives.

    python profiling generate-checks                     # on CUDA, as `make gpu-check` does
    python profiling generate-checks --device cpu --dtype float32
    python profiling generate-checks --dry-run           # the names of the cases

Runs the bundled target, greedy and sampled, with one row and with a ragged batch, in float32, bfloat16 and
float16. Plain greedy text is compared with ``model.generate``, and the text of every drafter with that of
``drafter=None``. In float32 all tokens must be equal, and equal to those of the CPU. In 16 bits two texts may
differ after a near-tie: up to and including the first different token, all logits must be equal except for
rounding. A drafter fails if none of its drafts was accepted, because that tests nothing.

Further calls, in float32, stop in several ways, continue a cache, stream, use processors that read the text,
record passes or not, and run on a second GPU, if there is one. Their text must be that of ``drafter=None`` on
the CPU. ``generate_cases.py`` names all cases.

Prints one line per case with PASS or FAIL; the exit code is 1 if any case failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import specdec_ext
from gpu import generate_cases as cases
from gpu.op_checks import CannotRun, report
from specdec_ext import DraftModelDrafter, HeadDrafter, NgramDrafter, assets
from specdec_ext.tree.config import TreeConfig

# Largest difference of a logit that rounding explains, as a share of the largest logit.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.01}
PROMPTS = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef read_all(paths):\n",
    "import os\n\n\nclass Node:\n    def __init__(self, value):\n",
    "for index in range(10):\n",
)
BATCHES = {"1 row": PROMPTS[:1], "ragged": PROMPTS}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 1}
TEXTS = {"greedy": GREEDY, "sampled": SAMPLED}
RECORDED = {"return_dict_in_generate": True, "output_logits": True}
Run = tuple[Tensor, Tensor]  # tokens [rows, new] and raw logits [rows, new, vocab]
Outcome = tuple[str, str | None]  # name of a case, and the reason why it fails


def why_different(ours: Run, baseline: Run, dtype: torch.dtype) -> str | None:
    """How the first run differs from the baseline, or None."""
    texts = zip(ours[0].tolist(), baseline[0].tolist(), strict=True)
    for row, (tokens, expected) in enumerate(texts):
        pairs = zip(tokens, expected, strict=True)
        parts = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parts is not None and dtype == torch.float32:
            return f"row {row} has token {tokens[parts]} at position {parts}, expected {expected[parts]}"
        end = len(tokens) if parts is None else parts + 1
        mine, theirs = ours[1][row, :end].float(), baseline[1][row, :end].float()
        delta, bound = (
            float((mine - theirs).abs().max()),
            ROUNDING[dtype] * float(theirs.abs().max()),
        )
        if not delta <= bound:
            return f"a logit of row {row} differs by {delta:.2g}; rounding explains {bound:.2g}"
    return None


def new_of(output: Any) -> Run:
    logits = torch.stack(output.logits, dim=1)
    return output.sequences[:, -logits.shape[1] :], logits


@dataclass
class World:
    """The bundled models on one device.

    Attributes:
        new_tokens: number of tokens that a call generates.
    """

    model: Any
    draft: Any
    tokenizer: Any
    new_tokens: int

    @classmethod
    def load(cls, dtype: torch.dtype, device: torch.device, new_tokens: int) -> World:
        models: list[Any] = [assets.load_target(dtype), assets.load_draft(dtype)]
        return cls(*(each.to(device) for each in models), assets.load_tokenizer(), new_tokens)

    def inputs(self, batch: str) -> Any:
        texts = list(BATCHES[batch])
        return self.tokenizer(texts, return_tensors="pt", padding=True).to(self.model.device)

    def drafters(self) -> dict[str, Any]:
        head = assets.load_head()
        return {
            "ngram": NgramDrafter(min_ngram=1, num_branches=2),
            "head, a chain": HeadDrafter(head, TreeConfig(depth=4)),
            "head, a tree": HeadDrafter(head, TreeConfig(depth=4, top_k=4, num_nodes=16)),
            "draft model": DraftModelDrafter(self.draft),
            "sampled draft model": DraftModelDrafter(self.draft, sampled=True),
        }

    def generate(self, drafter: Any, batch: str = "ragged", **kwargs: Any) -> Any:
        limit = {} if "max_length" in kwargs else {"max_new_tokens": self.new_tokens}
        given = {**GREEDY, "eos_token_id": None, "speculation": "fixed", **self.inputs(batch)}
        return specdec_ext.generate(self.model, **{**given, **limit, **kwargs}, drafter=drafter)


def _attempt(check: Callable[..., str | None], *arguments: Any) -> str | None:
    """Run a check. An exception is a reason to fail, because the other cases should still run."""
    try:
        return check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


# --- every drafter, batch and kind of text ----------------------------------------------------------


def grid_checks(dtype_name: str, world: World, cpu: World | None) -> Iterator[Outcome]:
    dtype, drafters = getattr(torch, dtype_name), world.drafters()
    for batch, text in product(cases.BATCHES, cases.TEXTS):
        kwargs, where = {"batch": batch, **TEXTS[text]}, (text, batch, dtype_name)
        plain = new_of(world.generate(None, **kwargs, **RECORDED))
        if cpu is not None:
            on_cpu = new_of(cpu.generate(None, **kwargs, **RECORDED))
            on_cpu = on_cpu[0].to(plain[0].device), on_cpu[1].to(plain[1].device)
            yield cases.grid_name(cases.ON_CPU, *where), why_different(plain, on_cpu, dtype)
        if text == "greedy":
            limit = {"max_new_tokens": world.new_tokens, "eos_token_id": None}
            given = {**world.inputs(batch), **limit, **GREEDY, **RECORDED}
            baseline = new_of(world.model.generate(**given))
            yield cases.grid_name(cases.PLAIN, *where), why_different(plain, baseline, dtype)
        for drafter in cases.DRAFTERS:
            arguments = world, drafters[drafter], kwargs, plain, dtype
            yield cases.grid_name(drafter, *where), _attempt(_why_drafter_fails, *arguments)


def _why_drafter_fails(
    world: World, drafter: Any, kwargs: dict[str, Any], plain: Run, dtype: torch.dtype
) -> str | None:
    output = world.generate(drafter, **kwargs, **RECORDED)
    ours = new_of(output)
    if why := why_different(ours, plain, dtype):
        return why
    if not output.speculation_stats.accepted_tokens:
        return "no draft was accepted"
    # A usual call records no logits and takes another path through verification.
    usual = world.generate(drafter, **kwargs)[:, -world.new_tokens :]
    return None if torch.equal(usual, ours[0]) else "recording logits changes the text"


# --- calls with something else to get right ---------------------------------------------------------

# A call with a drafter, and the tokens that it gave.
Call = Callable[[World, Any], list[list[int]]]


SECOND_DEVICE = "second device"


def _one_call(**kwargs: Any) -> Call:
    return lambda world, drafter: world.generate(drafter, **kwargs).tolist()


def _end_of_sequence(world: World, drafter: Any) -> list[list[int]]:
    """Rows end at the token that the first row has in the middle of its plain text."""
    plain = world.generate(None)[:, -world.new_tokens :]
    return world.generate(drafter, eos_token_id=int(plain[0, world.new_tokens // 2])).tolist()


def _stop_string(world: World, drafter: Any) -> list[list[int]]:
    return world.generate(drafter, stop_strings=["\n"], tokenizer=world.tokenizer).tolist()


def _max_length(world: World, drafter: Any) -> list[list[int]]:
    columns = world.inputs("ragged")["input_ids"].shape[1]
    return world.generate(drafter, max_length=columns + 7).tolist()


class _Streamed:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def _streamer(world: World, drafter: Any) -> list[list[int]]:
    streamed = _Streamed()
    text = world.generate(drafter, "1 row", streamer=streamed).tolist()
    return [*text, streamed.tokens]


def _second_turn(world: World, drafter: Any) -> list[list[int]]:
    cache = DynamicCache(config=world.model.config)
    first = world.generate(drafter, "1 row", past_key_values=cache)
    return _continued(world, drafter, first, cache)


def _cache_of_transformers(world: World, drafter: Any) -> list[list[int]]:
    cache = DynamicCache(config=world.model.config)
    given = {**world.inputs("1 row"), "max_new_tokens": world.new_tokens, "eos_token_id": None}
    first = world.model.generate(**given, **GREEDY, past_key_values=cache)
    return _continued(world, drafter, first, cache)


def _continued(world: World, drafter: Any, text: Tensor, cache: DynamicCache) -> list[list[int]]:
    given = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    return world.generate(drafter, **given, past_key_values=cache).tolist()


CALLS: dict[str, Call] = {
    "end of sequence inside a draft": _end_of_sequence,
    "stop string": _stop_string,
    "max_length": _max_length,
    "repetition penalty": _one_call(**SAMPLED, repetition_penalty=1.3),
    "no repeated 3-grams": _one_call(no_repeat_ngram_size=3),
    "several sequences per prompt": _one_call(**SAMPLED, num_return_sequences=2),
    "streamer": _streamer,
    "prompt in chunks": _one_call(prefill_chunk_size=8),
    "second turn with the cache": _second_turn,
    "cache of model.generate": _cache_of_transformers,
    "speculation auto": _one_call(speculation="auto"),
    "rejection rule": _one_call(**SAMPLED, verification="rejection"),
    "recorded passes": _one_call(graphs=True),
    "no recorded passes": _one_call(graphs=False),
    SECOND_DEVICE: _one_call(),
}
# Under this rule the text depends on the drafts, so the same drafter gives the baseline.
DEPENDENT = "rejection rule"


def call_checks(world: World, cpu: World) -> Iterator[Outcome]:
    drafters, on_cpu = world.drafters(), cpu.drafters()
    for call, drafter in cases.CALLS.items():
        baseline = on_cpu[drafter] if call == DEPENDENT else None
        there = world
        if call == SECOND_DEVICE:
            if torch.cuda.device_count() < 2:
                yield cases.call_name(call), CannotRun("one GPU")
                continue
            # The first device stays the current one.
            there = World.load(torch.float32, torch.device("cuda:1"), world.new_tokens)
            drafters = there.drafters()
        arguments = CALLS[call], there, drafters[drafter], cpu, baseline
        yield cases.call_name(call), _attempt(_why_call_fails, *arguments)


def _why_call_fails(
    call: Call, world: World, drafter: Any, cpu: World, baseline: Any
) -> str | None:
    ours, expected = call(world, drafter), call(cpu, baseline)
    for row, (tokens, others) in enumerate(zip(ours, expected, strict=True)):
        if len(tokens) != len(others):
            return f"row {row} has {len(tokens)} tokens, expected {len(others)}"
        for column, (token, other) in enumerate(zip(tokens, others, strict=True)):
            if token != other:
                return f"row {row} has token {token} in column {column}, expected {other}"
    return None


def checks(dtype_name: str, device: torch.device, new_tokens: int) -> Iterator[Outcome]:
    """Yield the outcomes of all cases in one dtype."""
    dtype = getattr(torch, dtype_name)
    world = World.load(dtype, device, new_tokens)
    cpu = None
    if dtype == torch.float32:  # in 16 bits, CPU and GPU round differently
        cpu = World.load(dtype, torch.device("cpu"), new_tokens)
    yield from grid_checks(dtype_name, world, cpu)
    if cpu is not None:
        yield from call_checks(world, cpu)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", nargs="+", choices=cases.DTYPES, default=list(cases.DTYPES))
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--dry-run", action="store_true", help="print the cases and exit")
    options = parser.parse_args(arguments)
    if options.dry_run:
        print(*cases.case_names(options.dtype), sep="\n")
        return 0
    device = torch.device(options.device)
    outcomes = (checks(name, device, options.new_tokens) for name in options.dtype)
    return report(chain.from_iterable(outcomes))
