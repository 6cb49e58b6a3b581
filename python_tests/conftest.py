"""Fixtures of all tests; the modules that tests share are in ``helpers/``."""

import gc
import inspect
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # two pytest workers share two cores

from helpers.ops import emulation  # noqa: E402
from helpers.ops.op_cases import DEVICES  # noqa: E402

from specdec_ext.ops import _library  # noqa: E402

EMULATED_ROOMS = ("python_tests/ops", "python_tests/ptx")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--verdicts", type=Path, help="write the table of architectures to this folder"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.verdicts and not hasattr(config, "workerinput"):
        from helpers.checks.verdict_table import (
            tables,  # needs transformers, which tests of ops alone do not
        )

        for table in tables(config.option.verdicts):
            config.pluginmanager.register(table)
    config.addinivalue_line("markers", "emulated: an op's CUDA kernels, run on the host")
    config.addinivalue_line("markers", "ptx: emulated kernels that are nvcc's PTX, always slow")
    config.addinivalue_line("markers", "slow_emulated: slow if it is on emulated kernels")
    wanted = "not emulated" not in config.option.markexpr
    if wanted and not hasattr(config, "workerinput"):  # once, not in every xdist worker
        emulation.build([emulation.FAST_PTX] if _is_fast(config) else emulation.PTX)


def _is_fast(config: pytest.Config) -> bool:
    """Whether no test of the selected ones is on a PTX device."""
    return "not slow" in config.option.markexpr or "not ptx" in config.option.markexpr


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow_emulated") and item.get_closest_marker("emulated"):
            item.add_marker("slow")
        if item.get_closest_marker("ptx"):
            item.add_marker("slow")
        if item.get_closest_marker("emulated") and not item.nodeid.startswith(EMULATED_ROOMS):
            raise pytest.UsageError(
                f"{item.nodeid} runs emulated kernels; move it to {' or '.join(EMULATED_ROOMS)}, where the "
                "Makefile runs them"
            )


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay; the garbage collector would visit them again and again


_ran_as_ptx: set[int] = set()  # the kernels that this process has run as PTX


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    also_as_ptx = _may_run_as_ptx(pyfuncitem)
    if also_as_ptx:
        emulation.take_launched()  # those of tests before it
    try:
        result = yield
        if also_as_ptx and not emulation.take_launched() <= _ran_as_ptx:
            _run_as_ptx(pyfuncitem)
        return result
    except ValueError as error:
        from helpers.versions import skip_if_unknown  # needs transformers, as above

        skip_if_unknown(error)
        raise


def _may_run_as_ptx(test: pytest.Function) -> bool:
    """Whether a test is a fast one on emulated kernels: if it launches a new kernel, it also runs as PTX."""
    parameters = test.callspec.params if hasattr(test, "callspec") else {}
    is_emulated = parameters.get("device") == "emulated"
    return is_emulated and _is_fast(test.config) and emulation.has_ptx()


def _run_as_ptx(test: pytest.Function) -> None:
    test.add_report_section(
        "call", "device", f"passed on emulated, then ran on {emulation.FAST_PTX}"
    )
    _library.native = emulation.OPS[emulation.FAST_PTX]  # the fixture ``device`` undoes this
    test.obj(**{name: test.funcargs[name] for name in inspect.signature(test.obj).parameters})
    _ran_as_ptx.update(emulation.take_launched())


class SimulatedTime:
    """A clock on which a target pass takes a millisecond, whatever its width, and a reading 50 us."""

    PASS, READING = 1e-3, 5e-5

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += self.READING
        return self.seconds


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``speculation="auto"`` on a simulated clock, without memory of earlier tests.

    What it drafts then depends neither on the machine nor on the order of the tests. Wide passes take as long
    as narrow ones and drafts are cheap, so drafting pays if a draft is accepted occasionally.
    """
    if "transformers" not in sys.modules:
        return  # a test of ops alone
    from specdec_ext.decoding import loop
    from specdec_ext.schedule import memory
    from specdec_ext.schedule import settings as speculation

    clock, verify = SimulatedTime(), loop.DecodingLoop._verify

    def verify_after_a_pass(*arguments: Any, **keywords: Any) -> Any:
        clock.seconds += clock.PASS
        return verify(*arguments, **keywords)

    monkeypatch.setattr(loop.DecodingLoop, "_verify", verify_after_a_pass)
    monkeypatch.setattr(speculation, "AUTO", speculation.SpeculationConfig(clock=clock))
    memory._memories.clear()


@pytest.fixture
def by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run models by their own modules, as recorded passes do; the direct pass rounds in another order."""
    from specdec_ext.models.slots import target

    monkeypatch.setattr(target, "usable", lambda model, direct: None)


@pytest.fixture
def fresh_arena() -> None:
    """Forget the recorded passes of the tiny Llama."""
    from helpers.models.tiny import tiny_model

    import specdec_ext

    specdec_ext.free_graphs(tiny_model("llama"))


@pytest.fixture(params=[*emulation.PARAMS, *DEVICES])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the ops under test; the emulated kernels take CPU tensors."""
    return emulation.use(request.param, monkeypatch)


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> bool:
    """Whether ``device`` stands for emulated kernels, which need small cases."""
    return request.node.callspec.params["device"] in emulation.OPS


@pytest.fixture
def kernel(device: str, emulated: bool) -> bool:
    """Whether ``device`` runs CUDA kernels."""
    return emulated or device == "cuda"
