"""Native part of the build: the op library and the host module, compiled by ninja (build_support/native.py).

    pip install -v .        # or -e .; -v shows progress; the build folder build/native is incremental

Environment: ``SPECDEC_CUDA=auto|0|1`` (auto: nvcc is found), ``TORCH_CUDA_ARCH_LIST``, ``CXX``, ``NVCC``,
``CUDA_HOME``, ``MAX_JOBS``, ``SPECDEC_WATCHDOG=1`` for CUDA kernels that fail where they would hang,
``SPECDEC_STRICT=1`` for a build that fails where a kernel spills registers.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from subprocess import CalledProcessError

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"specdec_ext needs setuptools >= 77 to build, and this environment has {setuptools.__version__}: "
        "pip install --upgrade setuptools, or leave out --no-build-isolation"
    )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from build_support import BuildError, native  # noqa: E402
from build_support.toolchain import Toolchain, find_toolchain  # noqa: E402


def toolchain() -> Toolchain:
    try:
        return find_toolchain()
    except BuildError as error:
        sys.exit(str(error))


class CheckedDistInfo(dist_info):
    """Metadata are what pip asks for before it downloads dependencies: the time to say what is missing."""

    def run(self) -> None:
        toolchain()
        super().run()


class NinjaBuild(build_ext):
    """Builds the libraries incrementally and copies them to where they belong."""

    def build_extensions(self) -> None:
        try:
            libraries = native.build(toolchain())
        except CalledProcessError as error:
            sys.exit(f"specdec_ext was not built: {error}; the first error above says why")
        for name, library in libraries.items():
            target = Path(self.get_ext_fullpath(f"specdec_ext.{name}"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, target)

    def copy_extensions_to_source(self) -> None:
        # Python prefers modules for itself alone, which earlier versions have left here.
        for old in (ROOT / "specdec_ext").glob("*.cpython-*.so"):
            old.unlink()
        super().copy_extensions_to_source()


# Packages are put together in a folder that is empty: what was deleted since stays out of them.
with tempfile.TemporaryDirectory() as staging:
    setup(
        ext_modules=[
            Extension(f"specdec_ext.{name}", sources=[], py_limited_api=True)
            for name in native.LIBRARIES
        ],
        cmdclass={"build_ext": NinjaBuild, "dist_info": CheckedDistInfo},
        options={"build": {"build_base": staging}, "bdist_wheel": {"py_limited_api": "cp310"}},
    )
