"""Traces of small functions: what a CUDA graph can't repeat is found."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generation.cuda_like import CudaLike, cuda_like, reporting
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
    Trace,
    differences,
)
from torch import Tensor


@pytest.fixture(autouse=True)
def device():
    with cuda_like():
        yield


def on_device(*values: float) -> Any:
    return CudaLike(torch.tensor(values, device="cpu"))


def record(function: Callable[..., object], *arguments: Any) -> Trace:
    """The calls of a function."""
    trace = Trace()
    with reporting(trace.add):
        function(*arguments)
    return trace


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
    traces = [record(first_of, given, count) for count in (1, 2)]
    (found,) = differences(*traces)  # the product and the sum only follow
    line = first_of.__code__.co_firstlineno + 1
    assert (found.cause, found.site) == (NUMBER, f"test_trace.py:{line} first_of")
    assert str(found) == f"call 0, aten::slice: 1 became 2, at {found.site}"
    assert not causes(traces[0], record(first_of, given, 1))


def several_allocations(given: Any) -> Tensor:
    more = given + 1
    more = more * 2  # the first allocation is free now
    gc.collect()
    return more.cumsum(0)


def test_memory_that_was_allocated_in_the_round_may_be_elsewhere():
    given = on_device(1.0, 2.0, 3.0)
    first = record(several_allocations, given)
    kept = [torch.empty(3, device="cpu") for _ in range(5)]  # other addresses for the next round
    assert not causes(first, record(several_allocations, given)) and kept


def test_an_input_that_is_elsewhere_is_found_even_if_its_memory_is_reused():
    weights = on_device(1.0, 10.0, 100.0)

    def step(given: Any) -> Tensor:
        return (given * weights).sum()

    traces = [record(step, on_device(n, n, n)) for n in (1.0, 2.0)]
    assert causes(*traces) == [(ADDRESS, "mul")]


def test_an_input_of_another_shape_is_found():
    buffer = on_device(1.0, 2.0, 3.0)
    parts = [buffer[:count] for count in (1, 2)]
    assert causes(*(record(torch.exp, part) for part in parts)) == [(SHAPE, "exp")]


def test_a_size_from_the_device_is_found():
    def positive(given: Any) -> Tensor:
        return given.nonzero() + 1

    given = on_device(1.0, 0.0, 3.0)
    first = record(positive, given)
    given[0] = 0
    assert causes(first, record(positive, given)) == [(SIZE, "nonzero")]


def test_other_calls_are_found():
    given = on_device(1.0, 4.0)
    traces = [
        record(lambda each: each.sqrt().exp(), given),
        record(lambda each: each.exp(), given),
    ]
    assert causes(*traces) == [(ORDER, "sqrt")]

    def repeated(each: Any, times: int) -> Tensor:
        for _ in range(times):
            each = each.exp()
        return each

    traces = [record(repeated, given, times) for times in (1, 2)]
    assert [str(each).partition(",")[0] for each in differences(*traces)] == ["call 1"]
    assert causes(*traces) == [(ORDER, "exp")]


def test_a_number_in_a_host_tensor_is_found():
    given = on_device(1.0, 2.0)
    traces = [record(torch.mul, given, torch.tensor(n, device="cpu")) for n in (2.0, 3.0)]
    assert causes(*traces) == [(NUMBER, "mul")]


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
    calls = [call for call in record(act, given).calls if call.kind != NO_LAUNCH]
    assert [call.kind for call in calls] == kinds
    line = f"test_trace.py:{act.__code__.co_firstlineno} <lambda>"
    assert {call.site for call in calls} <= {line}


def test_values_are_those_of_the_cpu_and_devices_do_not_mix():
    given = on_device(0.0, 1.0)
    given[0] = 7.0
    assert given.tolist() == [7.0, 1.0]
    with pytest.raises(RuntimeError, match="add was given tensors of cuda:0 and of the CPU"):
        given + torch.ones(3)
