"""Native part of the build: the op library and the host module, compiled by ninja (build_support/native.py).

    pip install -v .        # or -e .; -v shows progress; builds in build/native are incremental

Environment variables:

- ``SPECDEC_CUDA``: 1 builds the CUDA kernels, 0 does not, auto (default) builds them if nvcc is found;
- ``TORCH_CUDA_ARCH_LIST``: GPU architectures to build for, as torch reads it;
- ``CXX``, ``NVCC``, ``CUDA_HOME``: compilers to use;
- ``MAX_JOBS``: number of parallel compilers;
- ``SPECDEC_WATCHDOG=1``: CUDA kernels fail when they would wait forever;
- ``SPECDEC_STRICT=1``: the build fails if a kernel spills registers.
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
        f"specdec_ext needs setuptools >= 77 to build, but this environment has {setuptools.__version__}: "
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
    """Checks the toolchain first: pip asks for metadata before it downloads any dependency."""

    def run(self) -> None:
        toolchain()
        super().run()


class NinjaBuild(build_ext):
    """Builds the libraries incrementally and copies them into the package."""

    def build_extensions(self) -> None:
        try:
            libraries = native.build(toolchain())
        except CalledProcessError as error:
            sys.exit(f"specdec_ext was not built: {error}; see the first error above")
        for name, library in libraries.items():
            target = Path(self.get_ext_fullpath(f"specdec_ext.{name}"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, target)

    def copy_extensions_to_source(self) -> None:
        # Python would prefer these modules for one Python version, which earlier releases have left here.
        for old in (ROOT / "specdec_ext").glob("*.cpython-*.so"):
            old.unlink()
        super().copy_extensions_to_source()


# An empty staging folder, so that files deleted since the last build do not get into the package.
with tempfile.TemporaryDirectory() as staging:
    setup(
        ext_modules=[
            Extension(f"specdec_ext.{name}", sources=[], py_limited_api=True)
            for name in native.LIBRARIES
        ],
        cmdclass={"build_ext": NinjaBuild, "dist_info": CheckedDistInfo},
        options={"build": {"build_base": staging}, "bdist_wheel": {"py_limited_api": "cp310"}},
    )
