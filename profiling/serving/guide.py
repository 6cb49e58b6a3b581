"""GuideLLM against ``specdec serve``: 1, 2, 4 and 8 streams, then a sweep of request rates.

    python profiling guidellm --guidellm PROGRAM --out profiling/results/serving

PROGRAM is the command ``guidellm`` of an environment of its own (``pip install guidellm``). The server has
the bundled pair, and is asked to complete the held-out prompts. Writes GuideLLM's own reports,
``guidellm_streams.html`` and ``guidellm_sweep.html``. A failed request is an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from text_table import format_table

from serving.load import prompts
from serving.servers import contestants, running
from specdec_ext import assets
from specdec_ext.evaluate.machine import machine_line

TOKENS = 128
MOST_REQUESTS = 500  # of one run of GuideLLM
# Name -> options of GuideLLM.
RUNS = {
    "streams": [
        *("--profile", "kind=concurrent,streams=1", "--override", "profile.streams", "1,2,4,8"),
        *("--constraint", "kind=max_requests,count=48"),
    ],
    "sweep": [
        *("--profile", "kind=sweep,sweep_size=6,max_concurrency=16"),
        *("--constraint", "kind=max_duration,seconds=15"),
    ],
}
HEADS = [
    *("load", "requests", "failed", "requests/s", "tokens/s"),
    *("first token p50, ms", "p95", "per token p50, ms", "p99"),
]


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
        dataset = place / "prompts.jsonl"
        lines = (json.dumps({"prompt": each}) for each in islice(prompts(), MOST_REQUESTS))
        dataset.write_text("\n".join(lines))
        with running(found, threads, place / "log") as url:
            for run, chosen in RUNS.items():
                report = place / f"{run}.json"
                html = arguments.out / f"guidellm_{run}.html"
                backend = (
                    f"kind=openai_http,target={url},model=bundled,request_format=/v1/completions"
                )
                options = [
                    *("--backend", f"{backend},max_tokens={TOKENS}"),
                    *("--data", f"kind=json_file,path={dataset}"),
                    *("--tokenizer", f"kind=hf_auto,model={folder}"),
                    *("--output", f"kind=html,path={html}"),
                    *("--output", f"kind=json,path={report}"),
                ]
                command = [str(arguments.guidellm), "run", *chosen, *options, "--disable-progress"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                rows += [row_of(each) for each in json.loads(report.read_text())["benchmarks"]]
    print(machine_line(torch.device("cpu"), arguments.dtype))
    print(format_table(HEADS, rows, left=HEADS[:1]))
    if any(int(row[2]) for row in rows):
        raise SystemExit("requests failed")


def row_of(benchmark: dict[str, Any]) -> list[str]:
    """A row for one load of a report."""
    strategy, metrics = benchmark["config"]["strategy"], benchmark["metrics"]
    load = strategy["type_"]
    for name, unit in (("streams", "streams"), ("rate", "requests/s")):
        if strategy.get(name) is not None:
            load += f", {strategy[name]:.3g} {unit}"
    totals = metrics["request_totals"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    def quantile(name: str, share: str) -> str:
        return f"{metrics[name]['successful']['percentiles'][share]:.1f}"

    return [
        load,
        str(totals["successful"]),
        str(totals["errored"]),
        f"{mean('requests_per_second'):.2f}",
        f"{mean('output_tokens_per_second'):.0f}",
        quantile("time_to_first_token_ms", "p50"),
        quantile("time_to_first_token_ms", "p95"),
        quantile("inter_token_latency_ms", "p50"),
        quantile("inter_token_latency_ms", "p99"),
    ]
