"""``plan``: sizes against models that exist, known figures, what fits, and refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers import command_line
from helpers.drafters.medusa_cases import random_heads
from helpers.models.zoo import build
from helpers.places import GOLDEN
from transformers import AutoConfig

from specdec_ext import TreeConfig, assets
from specdec_ext.heads.checkpoints.medusa import save_medusa
from specdec_ext.models.slots.prefill import DIRECT_COLUMNS
from specdec_ext.planning.memory import largest, plan, slots_of
from specdec_ext.planning.sizes import configs
from specdec_ext.planning.sizes.configs import ConfigFile
from specdec_ext.planning.sizes.language_model import LanguageModel

BUNDLED = assets.FOLDER / "tiny-python-target"
HEAD = assets.FOLDER / "tiny-python-head"
GIB, MIB = 1 << 30, 1 << 20
LLAMA_8B = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
SHALLOW = dict(LLAMA_8B, num_hidden_layers=2)
LLAMA_70B = dict(
    LLAMA_8B,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
)


def head_of(target: dict, **more) -> dict:
    return {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32_000,
        **more,
    }


@pytest.fixture
def written(tmp_path):
    """A function that writes a config and returns its file."""

    def write(name: str, values: dict) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


def parts(found) -> dict[str, int]:
    return {part.name: part.num_bytes for part in found.parts}


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "mixtral", "qwen3_5_text", "gpt2", "falcon"]
)
def test_weights_and_cache_are_those_of_the_real_model(name):
    """The parameters, and what a pass leaves in the cache, of a model with data."""
    real = build(name)
    config = AutoConfig.for_model(**real.config.to_dict())
    planned = LanguageModel(config, torch.bfloat16)
    tensors = [*real.parameters(), *real.buffers()]
    assert planned.parameters == sum(each.numel() for each in real.parameters())
    floats = sum(each.numel() for each in tensors if each.is_floating_point())
    # Buffers such as rope frequencies stay in float32.
    assert planned.weights.total == pytest.approx(2 * floats, rel=0.02)
    tokens = 24
    with torch.no_grad():
        output = real(input_ids=torch.ones(2, tokens, dtype=torch.long), use_cache=True)
    cache = output.past_key_values
    # Windowed layers of transformers' own cache hold fewer slots, ours hold all.
    per_token = sum(
        layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel()
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None and layer.keys.numel()
    )
    assert planned.bytes_per_slot == 2 * per_token
    assert planned.run(2, tokens, True).logits == output.logits.numel() * 2


def test_figures_of_published_models(written):
    """Weights of EAGLE-3 heads with a draft vocabulary of 32k and the target's embedding, in bfloat16."""
    small = plan(written("8b", LLAMA_8B), written("8b_head", head_of(LLAMA_8B)))
    assert parts(small)["draft: own weights"] / GIB == pytest.approx(0.79, abs=0.005)
    assert sum(small.shared.values()) == 128_256 * 4096 * 2
    large = plan(
        written("70b", LLAMA_70B), written("70b_head", head_of(LLAMA_70B)), quantisation="float8"
    )
    assert parts(large)["draft: own weights"] / GIB == pytest.approx(2.61, abs=0.005)
    weights = sum(
        size for name, size in parts(large).items() if "weights" in name or "head" in name
    )
    assert weights - parts(large)["draft: own weights"] == pytest.approx(70e9, rel=0.03)
    head = ConfigFile.find(written("70b_head", head_of(LLAMA_70B))).head()
    assert 2 * head.num_layers * head.num_kv_heads * head.head_dim * 2 == 4096  # per token


def test_the_dtype_is_that_of_the_config_or_of_the_argument(written):
    for given, argument, size in (
        ("float32", "auto", 4),
        ("bfloat16", "auto", 2),
        ("bfloat16", torch.float32, 4),
        (None, "auto", 2),
    ):
        target = written("target", dict(SHALLOW, torch_dtype=given))
        found = plan(target, dtype=argument)
        assert parts(found)["target: lm_head"] == 128_256 * 4096 * size


def test_experts_in_float32(written):
    """The meta device knows their products in bfloat16 only."""
    experts = dict(SHALLOW, model_type="mixtral", architectures=["MixtralForCausalLM"])
    file = written("experts", dict(experts, num_local_experts=4, num_experts_per_tok=2))
    single, half = (plan(file, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert single.num_bytes == pytest.approx(2 * half.num_bytes, rel=0.001)


def test_modules_read_parts_of_a_prompt_on_the_cpu():
    """One op reads the rest; elsewhere, modules read all of it."""
    config = AutoConfig.for_model(**SHALLOW)

    def work(device: str) -> list[int]:
        model = LanguageModel(config, torch.bfloat16, device=device)
        return [model.run(2, tokens).work for tokens in (1000, 4000)]

    direct = LanguageModel(config, torch.bfloat16, device="cpu")._direct
    expected = [
        direct.work_bytes(2, DIRECT_COLUMNS, tokens) + direct.table_bytes(tokens)
        for tokens in (1000, 4000)
    ]
    assert work("cpu") == expected
    assert work("cpu") != work("cuda")


def test_a_head_needs_less_than_a_draft_model(written):
    found = plan(written("8b", LLAMA_8B), written("head", head_of(LLAMA_8B)), rows=4)
    head, model = found.compared
    assert model.name == "a 1B draft model"
    assert 1.2e9 * 2 < model.weights < 1.3e9 * 2
    assert head.weights < model.weights / 2 and head.cache < model.cache / 4


def test_quantised_targets(written):
    """Embedding and lm_head stay in the model's dtype."""
    sizes = {}
    for name in ("none", "float8", "int8", "int4"):
        found = plan(written("target", SHALLOW), quantisation=name)
        for end in ("embedding", "lm_head"):
            assert parts(found)[f"target: {end}"] == 128_256 * 4096 * 2
        sizes[name] = parts(found)["target: other weights"]
    assert sizes["float8"] == sizes["int8"] == pytest.approx(sizes["none"] / 2, rel=0.001)
    assert sizes["int4"] == pytest.approx(sizes["none"] * (4 + 20 / 128) / 16, rel=0.001)
    recorded = dict(SHALLOW, quantization_config={"quant_method": "fp8"})
    found = plan(written("fp8", recorded))
    assert parts(found)["target: other weights"] == sizes["float8"]
    kept = {"quant_method": "fp8", "modules_to_not_convert": ["mlp"]}
    found = plan(written("kept", dict(SHALLOW, quantization_config=kept)))
    mlp = 2 * 3 * 4096 * 14_336
    assert parts(found)["target: other weights"] == sizes["float8"] + mlp
    odd = dict(SHALLOW, quantization_config={"quant_method": "vinyl"})
    with pytest.raises(ValueError, match="quant_method is 'vinyl', whose size is not known"):
        plan(written("odd", odd))


def test_only_layouts_of_the_device_are_counted(written):
    """On a GPU, passes are recorded over a second cache; on the CPU, a shared lm_head is copied."""
    shared = head_of(SHALLOW, draft_vocab_size=None)
    files = written("target", SHALLOW), written("head", shared)
    gpu = plan(*files, device="cuda")
    cpu = plan(*files, device="cpu", draft_quantisation="none")
    assert "target: arena of recorded passes" in parts(gpu)
    assert "target: arena of recorded passes" not in parts(cpu)
    assert "target: arena of recorded passes" not in parts(plan(*files, graphs=False))
    lm_head = 128_256 * 4096 * 2
    assert gpu.shared == {"embedding": lm_head, "lm_head": lm_head}
    assert cpu.shared == {"embedding": lm_head}
    own = "draft: own weights"
    assert parts(cpu)[own] - parts(gpu)[own] == lm_head
    # Layers and fc in 8 bits, and a copy of lm_head in 8 bits.
    for quantised in (plan(*files, draft_quantisation="int8"), plan(*files, device="cpu")):
        assert parts(quantised)[own] == pytest.approx((parts(gpu)[own] + lm_head) / 2, rel=0.001)


def test_the_largest_rows_and_context_are_the_last_that_fit():
    arguments = dict(draft=HEAD, device="cpu", new_tokens=16)
    memory = 48 * MIB
    found = plan(BUNDLED, context=300, rows=2, memory=memory, **arguments)
    assert found.fits and found.largest_rows > 2
    for rows, fits in ((found.largest_rows, True), (found.largest_rows + 1, False)):
        assert plan(BUNDLED, context=300, rows=rows, memory=memory, **arguments).fits is fits
    assert found.largest_context == 512  # the positions of the bundled model
    small = plan(BUNDLED, context=300, rows=2, memory="1MiB", **arguments)
    assert (small.fits, small.largest_rows, small.largest_context) == (False, 0, 0)
    missing = small.num_bytes - small.available
    assert f"{missing / MIB:.1f} MiB are missing" in str(small)


@pytest.mark.parametrize("available", [0, 3, 5, 99, 160, 12_345, 10**9])
@pytest.mark.parametrize("most", [None, 70])
def test_the_search_finds_the_largest_number(available, most):
    asked = []

    def needed(number: int) -> int:
        asked.append(number)
        return 3 * number + number * number // 50 + (40 if number > 20 else 0)

    found = largest(needed, available, 1, most)
    assert len(asked) <= 20
    fitting = [n for n in range(1, (most or 300_000) + 1) if needed(n) <= available]
    assert found == max(fitting, default=0)


def test_the_search_on_a_straight_line_is_short():
    asked = []

    def needed(number: int) -> int:
        asked.append(number)
        return 10**9 + 12_345 * number

    assert largest(needed, 2 * 10**9, 1) == 10**9 // 12_345
    assert len(asked) <= 9


@pytest.mark.parametrize(("prompt", "new"), [(100, 50), (100, 5000), (5000, 2000), (1, 1)])
def test_slots_are_those_of_a_call(prompt, new):
    """The buffers of a layer grow as in a call that writes blocks of 8 slots."""
    from specdec_ext.decoding.preparation import BLOCK_SLOTS
    from specdec_ext.models.cache.layers import RollbackLayer
    from specdec_ext.models.slots.target import FIRST_SLOTS

    layer, nodes = RollbackLayer(), 8
    layer.reserve(min(prompt + new + BLOCK_SLOTS, prompt + FIRST_SLOTS))

    def write(count: int) -> None:
        block = torch.zeros(1, 1, count, 1)
        layer.update(block, block)

    write(prompt)
    for _ in range(new - 1):
        write(nodes)
        layer.length -= nodes - 1
    assert slots_of(prompt, new, nodes) == pytest.approx(layer.key_buffer.shape[2], rel=0.01)


def test_a_draft_model_and_trees():
    draft = assets.FOLDER / "tiny-python-draft"
    chain = plan(BUNDLED, draft, context=300, device="cpu")
    assert chain.settings["draft"] == "chain of 4 tokens" and not chain.compared
    assert "target: lm_head" not in parts(chain)  # it is the embedding
    weights = sum(size for name, size in parts(chain).items() if "keys" not in name)
    models = assets.load_target(torch.bfloat16), assets.load_draft(torch.bfloat16)
    assert weights == pytest.approx(2 * sum(each.num_parameters() for each in models), rel=0.001)
    names = [phase.name for phase in chain.phases]
    assert names == ["the target reads the prompt", "the draft model reads the prompt", "a step"]
    tree = TreeConfig(depth=4, top_k=4, num_nodes=33)
    wide = plan(BUNDLED, HEAD, context=300, device="cpu", tree=tree, do_sample=True)
    step = wide.phases[-1].needs
    assert step["logits of a block"] == 33 * 4096 * 2  # bfloat16
    assert step["processed scores"] == 33 * 4096 * 4


def test_plans_show_themselves():
    found = plan(BUNDLED, HEAD, context=300, memory="24GiB")
    assert "fits into 90% of 24GiB" in str(found)
    text = found.explain()
    assert max(map(len, text.splitlines())) <= 80
    assert "memory by part" in text and "<table>" in found._repr_html_()
    assert json.loads(json.dumps(found.record()))["num_bytes"] == found.num_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rows=0), "rows is 0"),
        (dict(context=10, new_tokens=10), "new_tokens is 10 and context 10"),
        (dict(share=1.5), "share 1.5"),
        (dict(device="tpu"), "device is 'tpu'"),
        (dict(quantisation="int3"), "quantisation='int3' is not known"),
        (dict(draft_quantisation="int4", draft=HEAD), "weights='int4'"),
        (dict(draft_quantisation="float8", draft=HEAD, device="cpu"), "'float8' is for GPUs"),
        (dict(dtype="bf16"), "dtype is 'bf16'; expected a torch.dtype"),
        (dict(memory="H1"), "memory 'H1' is not known"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(BUNDLED, **arguments)


def test_configs_that_can_not_be_planned(written):
    with pytest.raises(OSError, match="neither a file nor a folder"):
        plan("/no/such/folder")
    with pytest.raises(ValueError, match="num_hidden_layers is 1000000000; expected an integer"):
        plan(written("deep", dict(LLAMA_8B, num_hidden_layers=10**9)))
    with pytest.raises(ValueError, match="transformers can't read its config"):
        plan(written("unknown", {"model_type": "unheard_of"}))
    bart, rwkv = (
        AutoConfig.for_model(name, num_hidden_layers=2).to_dict() for name in ("bart", "rwkv")
    )
    with pytest.raises(ValueError, match="because its passes depend on the values of tensors"):
        plan(written("bart", bart))
    with pytest.raises(
        ValueError, match="can't be planned, because transformers lays out its cache"
    ):
        plan(written("rwkv", rwkv))
    with pytest.raises(
        ValueError, match=r"reads hidden states of width 64, but those of .* have 256"
    ):
        plan(BUNDLED, GOLDEN / "eagle1_gqa" / "draft")
    with pytest.raises(ValueError, match="Medusa heads, whose sizes only their weights tell"):
        plan(BUNDLED, written("medusa", {"medusa_num_heads": 3}))


def test_8_bits_for_medusa_heads_are_refused(tmp_path):
    save_medusa(random_heads(), tmp_path)
    with pytest.raises(ValueError, match="'int8', but Medusa heads keep the target's dtype"):
        plan(BUNDLED, tmp_path, draft_quantisation="int8")


def test_of_a_hub_repository_only_the_config_is_downloaded(monkeypatch, written):
    asked = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        return written("cached", SHALLOW)

    monkeypatch.setattr(configs, "on_disk", lambda name: None)
    monkeypatch.setattr(configs, "hf_hub_download", download)
    assert plan("org/model").settings["dtype"] == "bfloat16"
    assert asked == [("org/model", "config.json")]


@pytest.mark.parametrize(
    "name", ["eagle1_gqa", "eagle3_gqa_small_vocab", "speculators_qwen3_two_layers"]
)
def test_a_config_alone_tells_almost_what_the_weights_tell(name, tmp_path):
    folder = GOLDEN / name / "draft"
    whole = ConfigFile.find(folder).head()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    alone = ConfigFile.find(tmp_path).head()
    assert alone.kind == whole.kind

    def size(config) -> int:
        shapes = config.tensor_shapes()
        return sum(math.prod(shapes[each]) for each in shapes if each != "embed_tokens.weight")

    assert size(alone) == pytest.approx(size(whole), rel=0.01)


def run(*arguments) -> tuple[int, str]:
    result = command_line.run("plan", *arguments, columns=200)
    return result.exit_code, command_line.words(result.output)


def test_the_command(tmp_path):
    target = BUNDLED / "config.json"
    code, text = run(target, "--draft", HEAD, "--context", 300, "--gpu", "H100")
    assert code == 0, text
    assert "fits into 90% of H100" in text and "draft: own weights" in text
    file, figure = tmp_path / "plan.json", tmp_path / "plan.png"
    small = ["--bytes", "1MiB", "--json", file, "--plot", figure]
    code, text = run(target, "--context", 300, *small)
    assert code == 1 and "are missing" in text
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert json.loads(file.read_text())["fits"] is False
    code, text = run(target, "--gpu", "H100", "--mig", "3g.40gb")
    assert code == 2 and "pass only one of them" in text
