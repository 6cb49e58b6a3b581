"""Train the models in ``specdec_ext/assets``, a small target for Python code and its draft model.

The script also writes the texts on which draft heads of the target are trained. Each step can be resumed; its
state is kept in ``--work`` (default ``build/bundled``):

    python tools/bundled/bundled_models.py prepare            # collect source files, train the tokenizer
    python tools/bundled/bundled_models.py train target --tokens 40e6
    python tools/bundled/bundled_models.py train draft --tokens 40e6
    python tools/bundled/bundled_models.py export target      # bf16 safetensors, model card with perplexity
    python tools/bundled/bundled_models.py export draft
    python tools/bundled/bundled_models.py texts              # head/text.jsonl and head/held_out.jsonl
    python tools/bundled/bundled_models.py completions        # beginnings of these, continued by the target
    python tools/bundled/bundled_models.py completions held_out --files 100

The last three steps need only the exported target, not the steps before it.

The corpus consists of the standard library with its tests and the installed packages. The hash of a file's
content decides whether it is held out, so all copies of a file are on the same side of the split.

The learning rate follows warm-up, stable phase and decay (Hu et al. 2024, MiniCPM, section 4): a run may be
stopped in the stable phase and given more tokens later; only the last fifth decays.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_ext.assets import load_target, load_tokenizer
from specdec_ext.display import enable_progress
from specdec_ext.training.data.examples import prompts
from specdec_ext.training.data.records import read_records
from specdec_ext.training.data.regenerate import regenerate

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
MAX_FILE_BYTES = 120_000
HELD_OUT_ONE_IN = 50
CORPUS_TOKENS_LIMIT = 60_000_000
CONTEXT = 512  # tokens per training window

ARCHITECTURES = {
    "target": dict(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "draft": dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    ),
}
ASSET_NAMES = {"target": "tiny-python-target", "draft": "tiny-python-draft"}

app = typer.Typer(help=__doc__, pretty_exceptions_show_locals=False)
Work = Annotated[Path, typer.Option(help="folder of the corpus, checkpoints and optimiser state")]
DEFAULT_WORK = Path("build/bundled")


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def source_files() -> list[Path]:
    """Python files of the standard library and of the installed packages, in a fixed order."""
    roots = {Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib", "platlib")}
    return sorted({path for root in roots for path in root.rglob("*.py")})


def read_unique_texts() -> tuple[list[str], list[str]]:
    """(training texts, held-out texts), without exact duplicates, very large and non-text files."""
    seen: set[bytes] = set()
    split: tuple[list[str], list[str]] = ([], [])
    for path in source_files():
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if not 200 < len(raw) < MAX_FILE_BYTES or digest in seen:
            continue
        seen.add(digest)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if sum(character > "\x7f" for character in text) > 0.01 * len(text):
            continue
        split[digest[0] % HELD_OUT_ONE_IN == 0].append(text)
    return split


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@app.command()
def prepare(work: Work = DEFAULT_WORK) -> None:
    """Collect the corpus, train the tokenizer and write ``train.npy`` / ``held_out.npy`` (uint16)."""
    work.mkdir(parents=True, exist_ok=True)
    training, held_out = read_unique_texts()
    shuffle = np.random.default_rng(0)
    shuffle.shuffle(training)
    print(f"{len(training)} training files, {len(held_out)} held-out files")
    raw = train_tokenizer(training[:: max(1, len(training) // 3000)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.save_pretrained(work / "tokenizer")
    end = raw.token_to_id(END_OF_TEXT)
    for name, texts in (("train", training), ("held_out", held_out)):
        ids: list[int] = []
        for start in range(0, len(texts), 500):
            for encoding in raw.encode_batch_fast(texts[start : start + 500]):
                ids.append(end)
                ids.extend(encoding.ids)
            if len(ids) > CORPUS_TOKENS_LIMIT:
                break
        np.save(work / f"{name}.npy", np.asarray(ids, dtype=np.uint16))
        print(f"{name}: {len(ids):,} tokens")
    (work / "held_out_texts.json").write_text(json.dumps(held_out))


@app.command()
def texts(work: Work = DEFAULT_WORK) -> None:
    """Write the corpus as ``head/text.jsonl`` and ``head/held_out.jsonl``, for training draft heads."""
    folder = work / "head"
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = read_unique_texts()
    np.random.default_rng(0).shuffle(training)
    for name, side in (("text", training), ("held_out", held_out)):
        path = folder / f"{name}.jsonl"
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in side)
        partial.replace(path)
        print(f"{path}: {len(side)} files")


@app.command()
def completions(
    side: Annotated[str, typer.Argument(help="text or held_out")] = "text",
    files: Annotated[int, typer.Option(help="Read only this many texts.")] = 17_500,
    batch: int = 64,
    threads: int = 2,
    work: Work = DEFAULT_WORK,
) -> None:
    """Let the target continue a piece of each text at each of the temperatures 0, 0.8 and 1.

    Runs in bfloat16, which is twice as fast; the texts are used for training, not for comparison.
    """
    torch.set_num_threads(threads)
    records = read_records(work / "head" / f"{side}.jsonl")[:files]
    target, tokenizer = load_target(torch.bfloat16), load_tokenizer()

    enable_progress()
    for seed, temperature in enumerate((0.0, 0.8, 1.0)):
        regenerate(
            target,
            prompts(records, tokenizer, lengths=(16, 350), seed=seed),
            work / "head" / f"{side}_completions.jsonl",
            max_new_tokens=128,
            max_length=CONTEXT,
            temperature=temperature,
            batch=batch,
        )


def make_model(kind: str, context: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **ARCHITECTURES[kind],
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def make_optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for embeddings and norms."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if "layers." in name and parameter.ndim == 2 else rest).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_scale(step: int, total: int, warmup: int = 200, decay: float = 0.2) -> float:
    remaining = (total - step) / max(1, decay * total)
    return min(1.0, (step + 1) / warmup, max(remaining, 0.02))


def sample_batch(data: np.ndarray, step: int, batch: int, context: int) -> torch.Tensor:
    """The windows of one step; they depend only on the step, so a resumed run sees the same data."""
    starts = np.random.default_rng(step).integers(0, len(data) - context - 1, batch)
    return torch.from_numpy(np.stack([data[s : s + context] for s in starts]).astype(np.int64))


def loss_of(forward: Callable, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = forward(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
    )


@app.command()
def train(
    kind: Annotated[str, typer.Argument(help="target or draft")],
    tokens: float = 40e6,
    lr: float = 3e-3,
    batch: int = 8,
    context: int = CONTEXT,
    save_every: int = 200,
    work: Work = DEFAULT_WORK,
) -> None:
    """Train on ``tokens`` tokens in total; resumes from the newest state in ``--work``."""
    data = np.load(work / "train.npy", mmap_mode="r")
    model = make_model(kind, context)
    optimizers = make_optimizers(model, lr)
    folder = work / kind
    folder.mkdir(exist_ok=True)
    state_path = folder / "state.pt"
    progress = Progress()
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = Progress(**state["progress"])
        print(f"resuming at step {progress.step}, {progress.tokens:,} tokens")
    total = math.ceil(tokens / (batch * context))
    model.train()
    forward = torch.compile(model)
    running, started = None, time.time()
    while progress.step < total:
        scale = learning_rate_scale(progress.step, total)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        loss = loss_of(forward, sample_batch(data, progress.step, batch, context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        progress.step += 1
        progress.tokens += batch * context
        now = time.time()
        progress.seconds, started = progress.seconds + now - started, now
        if progress.step % 50 == 0:
            rate = progress.tokens / progress.seconds
            print(
                f"step {progress.step}/{total}  loss {running:.3f}  lr {lr * scale:.2e}  "
                f"{rate:,.0f} tokens/s",
                flush=True,
            )
        if progress.step % save_every == 0 or progress.step == total:
            partial = state_path.with_suffix(".partial")
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "progress": asdict(progress),
                },
                partial,
            )
            partial.replace(state_path)


@torch.inference_mode()
def held_out_perplexity(model: LlamaForCausalLM, work: Path, context: int, windows: int) -> float:
    data = np.load(work / "held_out.npy", mmap_mode="r")
    starts = np.linspace(0, len(data) - context - 1, windows).astype(int)
    losses = []
    for start in starts:
        ids = torch.from_numpy(data[start : start + context].astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    return math.exp(sum(losses) / len(losses))


CARD = """---
license: apache-2.0
library_name: transformers
---
# {name}

{what}
Made for demonstrations, tests and benchmarks of `specdec_ext`; it is not a useful assistant.

| | |
|---|---|
| architecture | Llama, {layers} layers, hidden {hidden}, {heads} heads over {kv_heads} KV heads, bf16 |
| parameters | {parameters:,} |
| vocabulary | {vocab} (byte-level BPE) |
| training text | {train_tokens:,} tokens of Python: standard library with tests, installed packages |
| tokens seen | {seen:,} in windows of {context} |
| held-out perplexity | {perplexity:.2f} per token ({windows} windows of {context}, unseen files) |

```
python tools/bundled/bundled_models.py prepare
python tools/bundled/bundled_models.py train {kind} --tokens {seen}
python tools/bundled/bundled_models.py export {kind}
```
"""


@app.command()
def export(
    kind: Annotated[str, typer.Argument(help="target or draft")],
    windows: int = 200,
    context: int = CONTEXT,
    assets: Path = Path("specdec_ext/assets"),
    work: Work = DEFAULT_WORK,
) -> None:
    """Write the bf16 checkpoint, the tokenizer and the model card, and print the held-out perplexity."""
    state = torch.load(work / kind / "state.pt", weights_only=True)
    model = make_model(kind, context)
    model.load_state_dict(state["model"])
    model = model.to(torch.bfloat16).eval()
    perplexity = held_out_perplexity(model.float(), work, context, windows)
    model = model.to(torch.bfloat16)
    if kind == "target":
        model.config.specdec_ext_draft = "bundled"  # tools/bundled/bundled_head.py
        model.config.specdec_ext_draft_model = "bundled"
    folder = assets / ASSET_NAMES[kind]
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for path in (work / "tokenizer").iterdir():
        shutil.copy(path, folder / path.name)
    config = model.config
    card = CARD.format(
        name=ASSET_NAMES[kind],
        what={
            "target": "A small language model of Python source, the target of the bundled pair.",
            "draft": "A smaller model with the tokenizer of `tiny-python-target`, its draft model.",
        }[kind],
        kind=kind,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        parameters=model.num_parameters(),
        vocab=config.vocab_size,
        train_tokens=len(np.load(work / "train.npy", mmap_mode="r")),
        seen=state["progress"]["tokens"],
        context=context,
        perplexity=perplexity,
        windows=windows,
    )
    (folder / "README.md").write_text(card)
    for path in folder.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB, held-out perplexity {perplexity:.2f}")


if __name__ == "__main__":
    sys.exit(app())
