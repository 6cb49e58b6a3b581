"""Traces of small functions: what a CUDA graph can't repeat is found, and a replay computes new results."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generation.cuda_like import DEVICE, CudaLike, cuda_like, reporting
from generation.trace import (
    ADDRESS,
    FROM_HOST,
    LAUNCH,
    NO_LAUNCH,
    NUMBER,
    ORDER,
    SHAPE,
    SIZE,
    TO_HOST,
    HostWait,
    Trace,
    differences,
    forbid_copies,
    replay,
)
from torch import Tensor


@pytest.fixture(autouse=True)
def device():
    with cuda_like():
        yield


def on_device(*values: float) -> Any:
    return CudaLike(torch.tensor(values, device="cpu"))


def record(function: Callable[..., Tensor], *arguments: Any) -> tuple[Trace, Any]:
    """The calls of a function, and its result's values, which a replay of the trace changes."""
    trace = Trace()
    with reporting(trace.add):
        result: Any = function(*arguments)
    return trace, result.inner


def causes(first: Trace, second: Trace) -> list[tuple[str, str]]:
    """Cause and op of each difference; all of them begin in this file."""
    found = list(differences(first, second))
    assert all(each.site.startswith("test_trace.py:") for each in found)
    return [(each.cause, each.name.removeprefix("aten::")) for each in found]


def first_of(given: Any, count: int) -> Tensor:
    part = given[:count]
    return (part * 2).sum()


def test_a_number_that_changes_is_found_where_it_enters():
    given = on_device(1.0, 2.0, 3.0)
    traces = [record(first_of, given, count)[0] for count in (1, 2)]
    (found,) = differences(*traces)  # the product and the sum only follow
    line = first_of.__code__.co_firstlineno + 1
    assert (found.cause, found.site) == (NUMBER, f"test_trace.py:{line} first_of")
    assert str(found) == f"call 0, aten::slice: 1 became 2, at {found.site}"
    assert not causes(traces[0], record(first_of, given, 1)[0])


def several_allocations(given: Any) -> Tensor:
    more = given + 1
    more = more * 2  # the first allocation is free now
    gc.collect()
    return more.cumsum(0)


def test_memory_that_was_allocated_in_the_round_may_be_elsewhere():
    given = on_device(1.0, 2.0, 3.0)
    first, result = record(several_allocations, given)
    kept = [torch.empty(3, device="cpu") for _ in range(5)]  # other addresses for the next round
    second, _ = record(several_allocations, given)
    assert kept and not causes(first, second)
    given.inner.fill_(5.0)
    replay(first)
    assert result.tolist() == [12.0, 24.0, 36.0]


def test_a_replay_continues_the_state():
    state, log = on_device(0.0), on_device(0.0, 0.0, 0.0, 0.0)

    def count(state: Any, log: Any) -> Tensor:
        state.add_(1)
        log[state.long()] = state * 10
        return log.sum()

    first, total = record(count, state, log)
    for _ in range(2):
        replay(first)
    assert (state.inner.item(), log.inner.tolist(), total.item()) == (3, [0, 10, 20, 30], 60)


def test_an_input_that_is_elsewhere_is_found_even_if_its_memory_is_reused():
    weights = on_device(1.0, 10.0, 100.0)

    def step(given: Any) -> Tensor:
        return (given * weights).sum()

    traces, totals = zip(*(record(step, on_device(n, n, n)) for n in (1.0, 2.0)), strict=True)
    assert causes(*traces) == [(ADDRESS, "mul")]
    replay(traces[0])
    assert totals[0].item() == 111.0
    replay(*traces)  # the caller of a graph copies its inputs
    assert totals[0].item() == totals[1].item() == 222.0


def test_an_input_of_another_shape_is_found():
    buffer = on_device(1.0, 2.0, 3.0)
    parts = [buffer[:count] for count in (1, 2)]
    assert causes(*(record(torch.exp, part)[0] for part in parts)) == [(SHAPE, "exp")]


def test_a_size_from_the_device_is_found():
    def positive(given: Any) -> Tensor:
        return given.nonzero() + 1

    given = on_device(1.0, 0.0, 3.0)
    first, _ = record(positive, given)
    given[0] = 0
    assert causes(first, record(positive, given)[0]) == [(SIZE, "nonzero")]
    with pytest.raises(HostWait, match=r"nonzero copies to host, at test_trace.py:\d+ positive"):
        replay(first)


def test_other_calls_are_found():
    given = on_device(1.0, 4.0)
    traces = [
        record(lambda each: each.sqrt().exp(), given)[0],
        record(lambda each: each.exp(), given)[0],
    ]
    assert causes(*traces) == [(ORDER, "sqrt")]

    def repeated(each: Any, times: int) -> Tensor:
        for _ in range(times):
            each = each.exp()
        return each

    traces = [record(repeated, given, times)[0] for times in (1, 2)]
    assert [str(each).partition(",")[0] for each in differences(*traces)] == ["call 1"]
    assert causes(*traces) == [(ORDER, "exp")]


def test_a_number_in_a_host_tensor_is_found():
    given = on_device(1.0, 2.0)
    traces = [record(torch.mul, given, torch.tensor(n, device="cpu"))[0] for n in (2.0, 3.0)]
    assert causes(*traces) == [(NUMBER, "mul")]


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda given: given.sum().item(), TO_HOST),
        (lambda given: given.tolist(), TO_HOST),
        (lambda given: bool(given.any()), TO_HOST),
        (lambda given: given.cpu(), TO_HOST),
        (lambda given: given[given > 1], TO_HOST),
        (lambda given: given[[0]], FROM_HOST),
        (lambda given: torch.tensor([1], device=DEVICE), FROM_HOST),
        (lambda given: torch.ones(1).to(DEVICE), FROM_HOST),
    ],
)
def test_copies_are_refused_with_their_line(act, kind):
    given = on_device(1.0, 2.0)
    line = f"test_trace.py:{act.__code__.co_firstlineno} <lambda>"
    with pytest.raises(HostWait, match=f"copies {kind}, at {line}"), reporting(forbid_copies):
        act(given)


@pytest.mark.parametrize(
    ("act", "kinds"),
    [
        (lambda given: given[:, 1:].t(), []),
        (lambda given: given + 1, [LAUNCH]),
        (lambda given: given.sum().item(), [LAUNCH, TO_HOST]),
        (lambda given: bool(given.sum() > 3), [LAUNCH, LAUNCH, TO_HOST]),
        (lambda given: given.tolist(), [TO_HOST]),
        (lambda given: given.cpu(), [TO_HOST]),
        (lambda given: given[given > 2], [LAUNCH, TO_HOST, LAUNCH]),
        (lambda given: given.nonzero(), [TO_HOST]),
        (lambda given: torch.tensor([1, 2], device="cuda:0"), [FROM_HOST]),
        (lambda given: torch.ones(2, device="cuda:0"), [LAUNCH]),
        (lambda given: torch.ones(2).to("cuda:0"), [FROM_HOST]),
        (lambda given: given[[0, 1]], [FROM_HOST, LAUNCH]),
        (lambda given: given[torch.tensor([0, 1])], [FROM_HOST, LAUNCH]),
        (lambda given: given.__setitem__((0, 0), 7.0), [LAUNCH]),
    ],
)
def test_kinds_of_calls_are_counted(act, kinds):
    given = on_device(0.0, 1.0, 2.0, 3.0, 4.0, 5.0).view(2, 3)
    trace = Trace()
    with reporting(trace.add):
        act(given)
    assert [call.kind for call in trace.calls if call.kind != NO_LAUNCH] == kinds


def test_values_are_those_of_the_cpu_and_devices_do_not_mix():
    given = on_device(0.0, 1.0)
    given[0] = 7.0
    assert given.tolist() == [7.0, 1.0]
    with pytest.raises(RuntimeError, match="add was given tensors of cuda:0 and of the CPU"):
        given + torch.ones(3)
