"""Tokens per second of generate on the bundled model: Hugging Face's ways and ours, interleaved.

    python profiling/bench_generate.py                          # float32, batch 1, the demo's prompts
    python profiling/bench_generate.py --dtype bfloat16 --out profiling/results/cpu_bfloat16
    python profiling/bench_generate.py --temperature 0.8        # sampled text repeats itself less

Prints a table under the machine line; with ``--out`` also writes ``<out>.json`` and ``<out>.png``. Ratios
are of medians over prompts, to Hugging Face ``generate`` in the same run. Texts are compared with Hugging
Face's; where they differ, the first difference is classified as near-tie or bug.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import specdec_ext
from specdec_ext import assets, benchmark

HF = "HF generate"


def contestants(target: Any, draft: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    def ours(drafter: Any) -> Any:
        def run(ids: torch.LongTensor) -> Any:
            return specdec_ext.generate(
                target, ids, drafter=drafter, return_dict_in_generate=True, **kwargs
            )

        return run

    return {
        HF: lambda ids: target.generate(ids, **kwargs),
        "HF prompt lookup": lambda ids: target.generate(ids, prompt_lookup_num_tokens=10, **kwargs),
        "HF assisted": lambda ids: target.generate(ids, assistant_model=draft, **kwargs),
        "specdec none": ours(None),
        "specdec n-gram": ours("ngram"),
        "specdec n-gram tree": ours(specdec_ext.NgramDrafter(num_draft_tokens=12, num_branches=3)),
        "specdec suffix": ours("suffix"),
        "specdec lookahead": ours("lookahead"),
        "specdec draft model": ours(draft),
        "specdec n-gram + draft model": ours(
            specdec_ext.CombinedDrafter(
                specdec_ext.NgramDrafter(), specdec_ext.DraftModelDrafter(draft)
            )
        ),
    }


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.2))
    names = [row["name"] for row in rows]
    colours = ["#9aa0a6" if name.startswith("HF") else "#1a73e8" for name in names]
    bars = axes.barh(names, [row["tokens_per_second"] for row in rows], color=colours)
    axes.bar_label(bars, [f"{row['ratio']:.2f}x" for row in rows], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("tokens per second, median over prompts")
    axes.set_title(title, fontsize=7, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(
    dtype: str = "float32",
    prompts: int = 10,
    max_new_tokens: int = 128,
    temperature: Annotated[float, typer.Option(help="sample; 0 is greedy")] = 0.0,
    repeats: Annotated[int, typer.Option(help="calls per prompt; the median counts")] = 3,
    out: Annotated[Path | None, typer.Option(help="write OUT.json and OUT.png")] = None,
) -> None:
    target = assets.load_target(getattr(torch, dtype))
    draft = assets.load_draft(getattr(torch, dtype))
    tokenizer = assets.load_tokenizer()
    texts = [prompt["prompt"] for prompt in assets.held_out_prompts()[:prompts]]
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    kwargs: dict[str, Any] = dict(max_new_tokens=max_new_tokens, do_sample=False)
    if temperature:
        # transformers and we draw different texts of one law: lengths are fixed, texts not compared
        kwargs.update(
            do_sample=True, temperature=temperature, top_k=0, min_new_tokens=max_new_tokens
        )
        torch.manual_seed(0)
    results = benchmark.interleave(contestants(target, draft, kwargs), ids, repeats)
    machine = benchmark.machine_line(target)
    rows = []
    for name, series in results.items():
        rows.append(
            {
                "name": name,
                "tokens_per_second": series.median_tokens_per_second,
                "ratio": series.ratio_to(results[HF]),
                "mean_acceptance_length": series.mean_acceptance_length,
                "emitted_per_step": series.emitted_per_step,
                "acceptance_per_position": series.acceptance_per_position,
                "same_text": (
                    ""
                    if temperature
                    else benchmark.same_text(series.compared_to(results[HF], target))
                ),
                "tokens_per_second_by_prompt": series.tokens_per_second,
            }
        )
    unique = results[HF].unique_4grams
    show(rows, machine, unique)
    if out is not None:
        report = {
            "machine": machine,
            "settings": {"dtype": dtype, "prompts": len(ids), "repeats": repeats, **kwargs},
            "unique_4gram_fraction": unique,
            "rows": rows,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        plot(rows, machine, out.with_suffix(".png"))


def show(rows: list[dict[str, Any]], machine: str, unique: float) -> None:
    table = Table(title=machine, title_justify="left", title_style="")
    for column in ("", "tokens/s", "ratio", "acceptance length", "emitted/step", "same text"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:

        def number(key: str, row: dict[str, Any] = row) -> str:
            return "" if row[key] is None else f"{row[key]:.2f}"

        table.add_row(
            row["name"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}x",
            number("mean_acceptance_length"),
            number("emitted_per_step"),
            row["same_text"],
        )
    console = Console(width=130)
    console.print(table)
    console.print(f"unique 4-grams in the completions: {unique:.0%}")


if __name__ == "__main__":
    typer.run(main)
