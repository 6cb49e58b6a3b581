"""GuideLLM against ``specdec serve``: 1, 2, 4 and 8 streams, then a sweep of request rates.

    python profiling guidellm --guidellm PROGRAM --out profiling/results/serving

PROGRAM is the command ``guidellm`` of an environment of its own (``pip install guidellm``). The server has the
bundled pair, the prompts are the held-out ones. Writes ``guidellm_streams.html`` and ``guidellm_sweep.html``,
GuideLLM's own reports, and ends with an error if a request failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from text_table import format_table

from serving.servers import contestants, running
from specdec_ext import assets
from specdec_ext.evaluate.machine import machine_line

TOKENS = 128
RUNS = {
    "streams": ("kind=concurrent,streams=[1,2,4,8]", "kind=max_requests,count=32"),
    "sweep": ("kind=sweep,sweep_size=6,max_concurrency=16", "kind=max_duration,seconds=15"),
}
HEADS = (
    "profile",
    "load",
    "requests",
    "failed",
    "requests/s",
    "tokens/s",
    "first token p95, ms",
    "per token p99, ms",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guidellm", type=Path, required=True, help="the command guidellm")
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    threads, folder = torch.get_num_threads(), assets.FOLDER / "tiny-python-target"
    found = contestants(folder, arguments.dtype, threads, None, Path())["specdec, auto"]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        prompts = place / "prompts.jsonl"
        lines = (json.dumps({"prompt": each["prompt"]}) for each in assets.held_out_prompts())
        prompts.write_text("\n".join(lines))
        with running(found, threads, place / "log") as url:
            for run, (profile, limit) in RUNS.items():
                report = place / f"{run}.json"
                html = arguments.out / f"guidellm_{run}.html"
                backend = (
                    f"kind=openai_http,target={url},model=bundled,request_format=/v1/completions"
                )
                options = {
                    "--backend": f"{backend},max_tokens={TOKENS}",
                    "--profile": profile,
                    "--constraint": limit,
                    "--data": f"kind=json_file,path={prompts}",
                    "--tokenizer": f"kind=hf_auto,model={folder}",
                }
                outputs = [
                    "--output",
                    f"kind=html,path={html}",
                    "--output",
                    f"kind=json,path={report}",
                ]
                command = [
                    arguments.guidellm,
                    "run",
                    *sum(map(list, options.items()), []),
                    *outputs,
                ]
                subprocess.run([*map(str, command), "--disable-progress"], check=True)
                rows += rows_of(run, json.loads(report.read_text()))
    print(machine_line(torch.device("cpu"), arguments.dtype))
    print(format_table(HEADS, rows, left=HEADS[:2]))
    if any(int(row[3]) for row in rows):
        raise SystemExit("requests failed")


def rows_of(run: str, report: dict) -> list[list[str]]:
    """A row for each load of a report."""
    raise NotImplementedError
