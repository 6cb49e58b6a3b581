"""The measuring tools: ``python profiling`` lists them, ``python profiling NAME --help`` explains one."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

# Name -> (module with a function main, the question that the tool answers).
TOOLS = {
    "ops": ("bench.ops", "How fast is an op?"),
    "draft-head": ("bench.draft_head", "How fast does a draft head draft?"),
    "suffix": ("bench.suffix", "What does a history of past outputs cost?"),
    "generate": ("bench.generate", "How fast is generation, with which drafter?"),
    "perplexity": ("bench.perplexity", "What do weights of 8 and 4 bits cost in quality?"),
    "goals": ("bench.goals", "Does generation reach its goals of speed and memory?"),
    "controller": ("bench.controller", 'Is "auto" as fast as the best fixed shape?'),
    "memory": ("bench.memory", "What does speculation add to the memory of a call?"),
    "peers": ("peers.race", "How fast is our CPU decoder beside other programs?"),
    "serving": ("serving.race", "How fast are servers, ours and others, under load?"),
    "guidellm": ("serving.guide", "What does GuideLLM say about our server?"),
    "acceptance": ("generation.acceptance", "How many drafts are accepted when a call samples?"),
    "count-round": ("generation.count_round", "What does a round of generation ask of a GPU?"),
    "kernel-report": ("cuda_kernels.kernel_report", "What did the compiler make of the kernels?"),
    "model-draft-head": ("cuda_kernels.model_draft_head", "How fast should a draft be on a GPU?"),
    "toolchains": ("toolchains.__main__", "Do all compilers take the kernels, without spills?"),
    "gpu-check": ("gpu.check", "Is all of it right and fast on this GPU?"),
    "op-checks": ("gpu.op_checks", "Does an op give the same bits every time, and in a graph?"),
    "generate-checks": ("gpu.generate_checks", "Is the text right with every drafter on this GPU?"),
    "nsight": ("gpu.nsight", "What happens inside an op or a call on this GPU?"),
}


def main() -> int | None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TOOLS:
        if name not in ("", "-h", "--help"):
            print(f"there is no tool {name!r}")
        print("usage: python profiling NAME [options]; --help explains the options of a tool\n")
        print(*(f"  {name:17}{question}" for name, (_, question) in TOOLS.items()), sep="\n")
        return 0 if name in ("", "-h", "--help") else 2
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]
    tool: int | None = import_module(TOOLS[name][0]).main()
    return tool


if __name__ == "__main__":
    sys.exit(main())
