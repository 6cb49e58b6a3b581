"""Throughput and latency of servers under the same load: ours, ``transformers serve`` and llama.cpp's.

    python profiling serving --llama PYTHON --out profiling/results/serving/race

All servers have the bundled model, and ours its draft head. They run at once, and each has its turn at each
number of streams in every repetition, so that other work on the machine slows all of them alike. A stream
requests one greedy completion after another. Their lengths differ, so that streams do not all end, and begin
to read a prompt, in the same step. llama.cpp takes part if PYTHON has the package
llama-cpp-python[server]; this environment then needs the package gguf.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections import defaultdict
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench.runner import Columns, Results, Row, table_parser

from serving.load import Reply, prompts, run_load
from serving.servers import Contestant, contestants, running
from specdec_ext import assets
from specdec_ext.evaluate.machine import machine_line

COLUMNS: Columns = {
    "streams": "{streams}",
    "server": "{server}",
    "tokens/s": "{tokens_per_second:.0f}",
    "min": "{least:.0f}",
    "max": "{most:.0f}",
    "first token, ms": "{first_p50:.0f}",
    "p95": "{first_p95:.0f}",
    "per token p50, ms": "{token_p50:.2f}",
    "p99": "{token_p99:.2f}",
    "gap p50, ms": "{gap_p50:.1f}",
    "p99 of gaps": "{gap_p99:.1f}",
    "equal texts": "{equal:.0%}",
}
# Length of one completion after another, as a share of ``--tokens``.
LENGTHS = (1.0, 0.8, 1.15, 0.85, 1.2)
NOTES = [
    "Tokens per second of all streams together: median, least and most of the repetitions. Time to the first",
    "token. Time per token: the gap before a piece of text, divided by its tokens. Gap: what a reader waits",
    "between pieces. Equal texts: share of the texts that are those of plain decoding by our server.",
]


def main() -> None:
    parser = table_parser(__doc__, repeats=5, unit="repetitions")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="mean new tokens of a completion")
    parser.add_argument(
        "--requests", type=int, default=2, help="requests of each stream; 4 in all at least"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--llama", type=Path, help="Python with llama-cpp-python[server]")
    parser.add_argument("--only", nargs="+", help="names of servers; default: all")
    arguments = parser.parse_args()
    threads = arguments.threads or torch.get_num_threads()
    folder = assets.FOLDER / "tiny-python-target"
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        gguf = Path(place) / "model.gguf"
        if arguments.llama is not None:
            from serving.gguf_file import write_gguf

            write_gguf(folder, gguf)
        found = contestants(folder, arguments.dtype, threads, arguments.llama, gguf)
        if arguments.only:
            found = {name: found[name] for name in arguments.only}
        urls = {
            name: stack.enter_context(running(each, threads, Path(place) / f"{number}.log"))
            for number, (name, each) in enumerate(found.items())
        }
        rows = measure(found, urls, arguments)
    machine = machine_line(torch.device("cpu"), arguments.dtype)
    settings = {
        "mean tokens of a completion": arguments.tokens,
        "requests of a stream": arguments.requests,
        "repetitions": arguments.repeats,
    }
    Results(
        "Servers side by side", machine, COLUMNS, ("streams", "server"), rows, settings, NOTES
    ).publish(arguments.out, arguments.add)


def measure(found: dict[str, Contestant], urls: dict[str, str], arguments: Namespace) -> list[Row]:
    """A row for each number of streams and each server. The first repetition only warms up."""
    texts = prompts()
    tokenizer = assets.load_tokenizer()
    replies: dict[tuple[int, str], list[Reply]] = defaultdict(list)
    speeds: dict[tuple[int, str], list[float]] = defaultdict(list)
    counts: dict[str, int] = {}

    def length(text: str) -> int:
        if text not in counts:
            counts[text] = len(tokenizer(text, add_special_tokens=False).input_ids)
        return counts[text]

    for repetition in range(arguments.repeats + 1):
        for number in arguments.streams:
            # The same prompts for all servers.
            chosen = [next(texts) for _ in range(max(4, arguments.requests * number))]
            for name, url in urls.items():
                fields: dict[str, Any] = {**found[name].body, "temperature": 0}
                bodies = [
                    {**fields, "max_tokens": round(share * arguments.tokens), "prompt": each}
                    for share, each in zip(cycle(LENGTHS), chosen, strict=False)
                ]
                these, seconds = run_load(url, bodies, number)
                if repetition:
                    replies[number, name] += these
                    total = sum(length(reply.text) for reply in these)
                    speeds[number, name].append(total / seconds)
    rows = []
    for (number, name), these in replies.items():
        gaps = [gap for reply in these for gap in reply.gaps]
        each = [
            gap / max(1, length(piece))
            for reply in these
            for gap, piece in zip(reply.gaps, reply.pieces[1:], strict=True)
            for _ in range(max(1, length(piece)))
        ]
        row: Row = {"streams": number, "server": name, "replies": len(these)}
        speed = speeds[number, name]
        row |= {"tokens_per_second": median(speed), "least": min(speed), "most": max(speed)}
        row |= _quantiles("first", [reply.first for reply in these], 0.5, 0.95)
        row |= _quantiles("token", each, 0.5, 0.99) | _quantiles("gap", gaps, 0.5, 0.99)
        if (number, "specdec, plain") in replies:
            plain = replies[number, "specdec, plain"]
            pairs = zip(these, plain, strict=True)
            row["equal"] = sum(one.text == other.text for one, other in pairs) / len(these)
        rows.append(row)
    return rows


def _quantiles(name: str, seconds: list[float], *shares: float) -> Row:
    """Quantiles in milliseconds."""
    values = np.quantile(seconds, shares) * 1e3
    return {
        f"{name}_p{share * 100:.0f}": value for share, value in zip(shares, values, strict=True)
    }
