"""Row-invariant linears: the bits of a token's output do not depend on the number of rows."""

import threading

import pytest
import torch
from helpers.models.tiny import CONFIGS, VOCAB, prompts, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec_ext import ops
from specdec_ext.models import make_target
from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def op_calls(monkeypatch):
    """The numbers of rows that ops.linear was called with."""
    calls, linear = [], ops.linear

    def counted(input, *rest, **order):
        calls.append(input.numel())
        return linear(input, *rest, **order)

    monkeypatch.setattr(ops, "linear", counted)
    return calls


def small_linear(**changes):
    torch.manual_seed(0)
    return nn.Linear(40, 24, **changes).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "count"), [("llama", 7 * 3 + 1), ("gpt2", 4 * 3 + 1)])
def test_linears_of_a_model_are_row_invariant(name, count, dtype):
    model = tiny_model(name, dtype=dtype)
    linears = row_invariant(model)
    assert len(linears) == count
    for module in linears:
        is_transposed = type(module) is Conv1D
        input = torch.randn(33, module.weight.shape[0 if is_transposed else 1]).to(dtype)
        with torch.inference_mode(), row_invariant_linears(linears):
            alone = torch.cat([module(row[None]) for row in input])
            for rows in (2, 5, 8, 33):
                assert torch.equal(module(input[None, :rows])[0], alone[:rows])
        torch.testing.assert_close(alone, module(input).detach())


@pytest.mark.parametrize("name", CONFIGS)
def test_model_output_is_close_to_that_of_torch(name):
    model = tiny_model(name)
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        with row_invariant_linears(row_invariant(model)):
            actual = model(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_output_head_of_a_prompt_has_few_rows(monkeypatch):
    """It is wanted in one column; the order for many rows would transpose all its weights for it."""
    orders, op = {False: set(), True: set()}, ops.linear

    def recorded(input, weight, bias=None, *, many_rows=False):
        orders[many_rows].add(len(weight))
        return op(input, weight, bias, many_rows=many_rows)

    monkeypatch.setattr(ops, "linear", recorded)
    target = make_target(tiny_model("llama"), 64)
    target.runner.direct = None
    target.prefill(*prompts((40,)))
    assert orders[False] == {VOCAB} and orders[True] and VOCAB not in orders[True]


def test_modules_are_restored():
    module = small_linear()
    before = dict(module.__dict__)
    with pytest.raises(RuntimeError, match="stop"), row_invariant_linears([module]):
        with row_invariant_linears([module, module]):
            assert "forward" in module.__dict__
        assert "forward" in module.__dict__
        raise RuntimeError("stop")
    assert module.__dict__ == before


def test_other_threads_use_their_own_contexts(op_calls):
    """The last context that closes restores the module."""
    module, input = small_linear(), torch.randn(1, 40)

    @torch.inference_mode()
    def elsewhere():
        module(input)
        seen.append(len(op_calls))
        with row_invariant_linears([module]):
            both_open.wait()
            first_closed.wait()
            module(input)
            seen.append(len(op_calls))

    seen, both_open, first_closed = [], threading.Barrier(2), threading.Event()
    thread = threading.Thread(target=elsewhere)
    with row_invariant_linears([module]):
        thread.start()
        both_open.wait()
    assert "forward" in module.__dict__
    first_closed.set()
    thread.join()
    assert seen == [0, 1]
    assert "forward" not in module.__dict__


@torch.inference_mode()
def test_hooks_still_run(op_calls):
    module, seen = small_linear(), []
    module.register_forward_pre_hook(lambda module, args: seen.append("before"))
    module.register_forward_hook(lambda module, args, output: output + 1)
    with row_invariant_linears([module]):
        actual = module(torch.zeros(1, 40))
    assert seen == ["before"] and len(op_calls) == 1
    assert torch.equal(actual[0], module.bias + 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda module: module(torch.ones(1, 40)),  # records gradients
        torch.inference_mode()(lambda module: module.train()(torch.ones(1, 40))),
        torch.inference_mode()(
            lambda m: torch.autocast("cpu", torch.bfloat16)(m)(torch.ones(1, 40))
        ),
    ],
    ids=["gradients", "training", "autocast"],
)
def test_torch_computes_in_training_and_autocast(call, op_calls):
    module = small_linear()
    with row_invariant_linears(row_invariant(module)):
        actual = call(module)
    assert not op_calls
    assert torch.equal(actual, call(module))


@torch.inference_mode()
def test_input_may_have_any_strides():
    module = small_linear()
    input = torch.randn(40, 5, 4, 3).permute(3, 1, 2, 0)
    expected = module(input)
    with row_invariant_linears([module]):
        torch.testing.assert_close(module(input), expected)


class Subclass(nn.Linear):
    pass


def offloaded():
    module = small_linear()
    module.forward = lambda input: nn.Linear.forward(module, input)
    return module


def compiled():
    module = small_linear()
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "module",
    [
        Subclass(40, 24),
        small_linear(dtype=torch.float64),
        small_linear(device="meta"),
        nn.utils.parametrizations.weight_norm(small_linear()),
        torch.compile(small_linear(), backend="eager"),
        compiled(),
    ],
    ids=["subclass", "float64", "meta", "weight-norm", "compile", "compiled"],
)
def test_other_modules_are_not_replaced(module):
    assert row_invariant(module) == []


def test_replaced_forward_is_kept():
    module = offloaded()
    forward = module.forward
    with row_invariant_linears(row_invariant(module)):
        assert module.forward is forward
    assert module.forward is forward
