"""The training objective of draft heads against its formulas in float64.

A step of training-time test must compute what the head computes when it drafts, so it is compared with the
specification of ``draft_head``. Losses and gradients are compared with formulas without chunks and fused
kernels.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers.drafters.head_cases import KINDS, Run, head_of
from helpers.models import zoo
from helpers.models.tiny import CONFIGS, VOCAB, tiny_model
from helpers.texts.training_cases import example, greedy_examples, random_batch

from specdec_ext import ops
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaConfig, MedusaHeads
from specdec_ext.models.passes import linears
from specdec_ext.training.data.batches import Batch, OnlineFeatures, pad
from specdec_ext.training.objectives.attention import unrolled_attention
from specdec_ext.training.objectives.eagle import EagleObjective
from specdec_ext.training.objectives.loss import soft_cross_entropy
from specdec_ext.training.objectives.medusa_heads import MedusaObjective
from specdec_ext.training.objectives.noise import noise_of_choice
from specdec_ext.training.objectives.teacher import Teacher
from specdec_ext.training.start import new_head
from specdec_ext.tree.config import TreeConfig

STEPS = 3


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def objective_of(head: DraftHead, steps: int = STEPS) -> EagleObjective:
    run = Run.start(head, 1)
    return EagleObjective(head, run.embedding, run.lm_head, steps)


class TableTeacher:
    """Logits are a fixed function of the last hidden state."""

    def __init__(self, vocab: int, width: int):
        self.table = random(vocab, width, seed=3)

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        return last_hidden @ self.table.mT


@pytest.fixture(params=["all elements", "wanted elements"])
def unrolled(request, monkeypatch):
    """Later steps compute all elements of these short texts, or only those that the loss wants."""
    if request.param == "wanted elements":
        monkeypatch.setattr("specdec_ext.training.objectives.objective.COLUMNS", 1)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(
    ("depth", "some"), [(0, False), (1, False), (3, False), (1, True), (3, True)]
)
def test_attention_is_one_softmax_over_a_block_and_a_diagonal(window, depth, some):
    rows, heads, kv_heads, n, size = 2, 4, 2, 7, 8
    elements = [[0, 1, 4, 6], [2, 3, 4, 5]] if some else [list(range(n))] * rows
    m = len(elements[0])
    queries = random(rows, heads, m, size)
    counts = [n] + [m] * depth
    keys = [random(rows, kv_heads, count, size, seed=1 + i) for i, count in enumerate(counts)]
    values = [random(rows, kv_heads, count, size, seed=9 + i) for i, count in enumerate(counts)]
    mixed = unrolled_attention(
        queries, keys, values, window, torch.tensor(elements) if some else None
    )
    for row, head, j in itertools.product(range(rows), range(heads), range(m)):
        t, kv = elements[row][j], head // (heads // kv_heads)
        # Step, index in the step, element.
        seen = [(0, s, s) for s in range(t + 1)] + [(i, j, t) for i in range(1, depth + 1)]
        if window is not None:
            seen = [(i, at, s) for i, at, s in seen if i + s > depth + t - window]
        scores = torch.stack([keys[i][row, kv, at] for i, at, _ in seen])
        weights = (scores @ queries[row, head, j] * size**-0.5).softmax(dim=0)
        found = torch.stack([values[i][row, kv, at] for i, at, _ in seen])
        torch.testing.assert_close(mixed[row, head, j], weights @ found)


@pytest.mark.parametrize("elements", [None, [[0, 2, 3]]])
def test_attention_has_the_gradients_of_its_formula(elements):
    m = 4 if elements is None else 3
    blocks = [(1, 1, 4, 4), *[(1, 1, m, 4)] * 2] * 2
    shapes = [(1, 2, m, 4), *blocks]
    inputs = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    chosen = None if elements is None else torch.tensor(elements)
    assert torch.autograd.gradcheck(
        lambda q, *kv: unrolled_attention(q, list(kv[:3]), list(kv[3:]), None, chosen), inputs
    )


def test_soft_cross_entropy_is_its_formula(monkeypatch):
    monkeypatch.setattr(
        "specdec_ext.training.objectives.loss._LOGITS_CPU", 32 * 5
    )  # 32 elements at a time, the fewest
    hidden, weight = random(70, 3).requires_grad_(), random(5, 3, seed=1).requires_grad_()
    teacher = random(4, 5, seed=2).softmax(dim=-1)
    rows = torch.arange(70) * 3 % 4
    loss = soft_cross_entropy(hidden, weight, teacher, rows, 0.5)
    log_probs = (hidden @ weight.mT * 0.5).log_softmax(dim=-1)
    torch.testing.assert_close(loss, -(teacher[rows] * log_probs).sum())
    assert torch.autograd.gradcheck(
        lambda h, w: soft_cross_entropy(h, w, teacher, rows, 0.5), [hidden, weight]
    )
    assert soft_cross_entropy(hidden[:0], weight, teacher, rows[:0]).item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_step_are_those_of_a_drafted_level(kind):
    """With the drafted tokens as inputs, step i gives the scores of level i of the specification."""
    head = head_of(kind, dtype=torch.float64)
    objective = objective_of(head)
    batch = random_batch(head, rows=1, columns=8)
    for t in range(8 - 2 - STEPS):
        run = Run.start(head, 1)
        tokens, _, scores = run.draft(
            TreeConfig(depth=STEPS), batch.tokens[:, 1 : t + 2], batch.features[:, : t + 1]
        )
        fed = batch.tokens.clone()
        fed[:, t + 1 : t + 2 + STEPS] = tokens
        with torch.no_grad():
            steps = list(objective.unroll(dataclasses.replace(batch, tokens=fed), STEPS))
        total = torch.zeros((), dtype=torch.float64)
        for level, step in enumerate(steps, start=1):
            logits = step.hidden[0, t] @ step.lm_head.mT * head.config.logit_scale
            best, drafted = logits.log_softmax(dim=-1).max(dim=-1)
            ids = head.tensors.get("draft_to_target")
            assert (drafted if ids is None else ids[drafted]) == tokens[0, level]
            total += best
            torch.testing.assert_close(total, scores[0, level], rtol=1e-9, atol=1e-9)


def naive_losses(objective, batch: Batch, teacher: TableTeacher) -> torch.Tensor:
    """The formula for each element."""
    ids = objective.draft_to_target
    losses = []
    for i, step in enumerate(objective.unroll(batch, objective.steps)):
        parts = []
        for row in range(len(batch.tokens)):
            for t in range(batch.tokens.shape[1] - 2 - i):
                target = teacher.logits(batch.last_hidden[row, t + 1 + i])
                drafted = target if ids is None else target[ids]
                if batch.loss_mask[row, t + 2 + i] and drafted.max() == target.max():
                    logits = step.hidden[row, t] @ step.lm_head.mT * objective.logit_scale
                    parts.append(-(drafted.softmax(-1) * logits.log_softmax(-1)).sum())
        losses.append(torch.stack(parts).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1", "no-fc", "p-eagle", "medusa"])
def test_losses_are_means_over_masked_tokens(kind, unrolled):
    if kind == "medusa":
        config = MedusaConfig(STEPS, 1, 32, VOCAB, 61)
        shapes = config.tensor_shapes()
        tensors = {
            name: random(*shape, seed=i) * 0.2 for i, (name, shape) in enumerate(shapes.items())
        }
        tensors["draft_to_target"] = torch.arange(61) + 3
        objective = MedusaObjective(MedusaHeads(config, tensors))
        batch = random_batch(head_of("eagle3"), rows=2, columns=9)
    else:
        head = head_of(kind, dtype=torch.float64)
        objective = objective_of(head)
        batch = random_batch(head, rows=2, columns=9)
    batch.loss_mask[0, 5:] = False
    batch.loss_mask[1, :4] = False
    teacher = TableTeacher(VOCAB, batch.last_hidden.shape[-1])
    loss, losses = objective(batch, teacher)
    expected = naive_losses(objective, batch, teacher)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(loss, expected[0] + 0.8 * expected[1] + 0.64 * expected[2])


@pytest.mark.parametrize("kind", ["eagle3.1", "qk-norm-window", "p-eagle"])
def test_gradients_flow_through_the_steps(kind, unrolled):
    """The change of the loss in a random direction of all weights is that of its gradients."""
    head = head_of(kind, dtype=torch.float64)
    objective = objective_of(head)
    batch = random_batch(head, rows=2, columns=9)
    batch.loss_mask[0, :5] = False
    batch.loss_mask[1, 7:] = False
    teacher = TableTeacher(VOCAB, batch.last_hidden.shape[-1])
    objective(batch, teacher)[0].backward()
    parameters = list(objective.parameters())
    directions = [random(*each.shape, seed=i) for i, each in enumerate(parameters)]
    rise = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions, strict=True))
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter += step * direction
            values.append(float(objective(batch, teacher)[0]))
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter -= step * direction
    assert rise == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)
    # Step 0 alone reads the features, but gradients of later steps reach them.
    objective.zero_grad()
    step = list(objective.unroll(batch, STEPS))[-1]
    step.hidden.sum().backward()
    assert float(objective.weights["fc/weight"].grad.abs().max()) > 0


@pytest.mark.parametrize("token", [STEPS + 1, 6, 8])
def test_mask_belongs_to_the_predicted_token(token, unrolled):
    """The loss depends only on the target's distribution before the masked token."""
    head = head_of("eagle3.1", dtype=torch.float64)
    objective = objective_of(head)
    batch = random_batch(head, rows=1, columns=9)
    batch.loss_mask[:] = False
    batch.loss_mask[0, token] = True
    teacher = TableTeacher(VOCAB, batch.last_hidden.shape[-1])
    _, losses = objective(batch, teacher)
    assert (losses > 0).all()
    for column in range(9):
        changed = batch.last_hidden.clone()
        changed[0, column] += 1
        _, others = objective(dataclasses.replace(batch, last_hidden=changed), teacher)
        assert bool((others != losses).all()) == (column == token - 1)
        assert bool((others != losses).any()) == (column == token - 1)


def test_first_tokens_have_fewer_steps(unrolled):
    """Step 0 of element 0 predicts token 2; later steps would need an earlier element."""
    head = head_of("eagle3.1", dtype=torch.float64)
    objective = objective_of(head)
    batch = random_batch(head, rows=1, columns=9)
    batch.loss_mask[:] = False
    batch.loss_mask[0, 2] = True
    _, losses = objective(batch, TableTeacher(VOCAB, batch.last_hidden.shape[-1]))
    assert (losses > 0).tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_the_target_are_those_of_a_prompt(dtype, monkeypatch):
    """All matrices of the target, on the CPU; torch's products in bfloat16 are slow without AVX-512."""
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    multiplied = []

    def linear(x, weight, bias=None, **kwargs):
        multiplied.append((id(weight), kwargs))
        return ops.linear(x, weight, bias, **kwargs)

    monkeypatch.setattr(linears, "ops", SimpleNamespace(linear=linear))
    features, teacher = OnlineFeatures(model, (1,)), Teacher(model)
    multiplied.clear()
    teacher.logits(features(greedy_examples(2, prompt=3, length=14)).last_hidden)
    matrices = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    assert sorted(each for each, _ in multiplied) == sorted(map(id, matrices))
    assert all(kwargs == {"many_rows": True} for _, kwargs in multiplied)


def test_paddings_do_not_change_agreement(unrolled):
    model = copy.deepcopy(tiny_model("llama")).double()
    features, teacher = OnlineFeatures(model, (1, 2, 3)), Teacher(model)
    texts = greedy_examples(2, prompt=3, length=14)
    short = example(texts[1].tokens[:9].tolist())
    objective = EagleObjective(
        new_head(model, (1, 2, 3)).to("cpu", torch.float64),
        *(model.get_input_embeddings().weight,) * 2,
        STEPS,
    )
    alone = [objective.agreement(features([each]), teacher, STEPS) for each in (texts[0], short)]
    both = objective.agreement(features([texts[0], short]), teacher, STEPS)
    assert torch.equal(both.accepted, torch.cat([each.accepted for each in alone]))


def test_agreement_counts_what_greedy_decoding_would_accept(unrolled):
    """At every place of a greedy text, accepted drafts are those that the specification drafts correctly."""
    model = tiny_model("llama")
    (text,) = greedy_examples(1, prompt=4, length=24)
    features = OnlineFeatures(model, (1, 2, 3))
    batch = features([text])
    batch.loss_mask[:, :4] = False  # the text behind the prompt is greedy
    head = new_head(model, (1, 2, 3))
    embedding = model.get_input_embeddings().weight.detach()
    # With the target's embedding as output head some drafts are right.
    objective = EagleObjective(head, embedding, embedding, STEPS)
    objective(batch, Teacher(model))[0].backward()
    optimizer = torch.optim.Adam(objective.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        objective(batch, Teacher(model))[0].backward()
        optimizer.step()
    lived = objective.agreement(batch, Teacher(model), STEPS).accepted.cumprod(dim=1).sum(dim=1)
    expected = []
    for t in range(2, 24 - 1 - STEPS):
        run = Run.start(objective.trained(), 1, embedding=embedding)
        tokens, _, _ = run.draft(
            TreeConfig(depth=STEPS), batch.tokens[:, 1 : t + 2], batch.features[:, : t + 1]
        )
        right = tokens[0, 1:] == batch.tokens[0, t + 2 : t + 2 + STEPS]
        expected.append(int(right.cumprod(dim=0).sum()))
    assert lived.tolist() == expected
    assert len(set(expected)) > 1


def test_noise_of_choice_is_gumbel_noise_that_chooses():
    """Over tokens that are drawn from the distribution, all noise is independent and Gumbel again."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([2.0, 1.0, -1.0, -40.0, -torch.inf])
    chosen = torch.multinomial(logits.softmax(0), 40_000, replacement=True, generator=generator)
    noise = noise_of_choice(logits.expand(len(chosen), -1), chosen, generator)
    assert torch.equal((logits + noise).argmax(dim=1), chosen)
    uniform = (-(-noise).exp()).exp()  # the distribution function of a Gumbel variable
    steps = torch.linspace(0, 1, len(chosen))
    for column in uniform.T:
        assert (column.sort().values - steps).abs().max() < 1.63 * len(chosen) ** -0.5  # KS, 1 %
    correlated = torch.corrcoef(uniform.T) - torch.eye(5)
    assert correlated.abs().max() < 4 * len(chosen) ** -0.5


@pytest.mark.parametrize("name", ["llama", "gemma2-window", "cohere", "granite", "gpt2"])
def test_teacher_has_the_logits_of_the_target(name, monkeypatch):
    model = tiny_model(name) if name in CONFIGS else zoo.build(name)
    if name == "granite":
        monkeypatch.setattr(model.config, "logits_scaling", 4.0)
    if name == "cohere":
        monkeypatch.setattr(model.config, "logit_scale", 0.25)
        monkeypatch.setattr(model, "logit_scale", 0.25)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        found = Teacher(model).logits(
            OnlineFeatures(model, (1,))([example(ids[0].tolist())]).last_hidden
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_target_with_other_logits_than_its_head_is_refused(monkeypatch):
    model = tiny_model("gemma2-window")
    monkeypatch.setattr(model.config, "final_logit_softcapping", None)
    with monkeypatch.context() as patched:
        patched.setattr(
            model, "forward", lambda **given: doubled(type(model).forward(model, **given))
        )
        with pytest.raises(ValueError, match="not its output head applied to its last hidden"):
            Teacher(model)


def doubled(output):
    output.logits = output.logits * 2
    return output


def test_pad_refuses_invalid_examples():
    with pytest.raises(ValueError, match="examples is empty"):
        pad([])
    with pytest.raises(ValueError, match=r"tokens of shape \[3\] and a loss_mask of shape \[2\]"):
        pad([dataclasses.replace(example([1, 2, 3]), loss_mask=torch.ones(2).bool())])
    tokens, mask, lengths = pad([example([1, 2, 3], [0, 1, 1]), example([4])])
    assert tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert mask.tolist() == [[False, True, True], [True, False, False]]
    assert lengths.tolist() == [3, 1]
