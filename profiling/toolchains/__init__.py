"""Every CUDA kernel, compiled by every compiler that users have: ``make toolchains``.

- :mod:`toolchains.compilers` installs compilers from the package index;
- :mod:`toolchains.matrix` compiles every kernel for every architecture with each, without a GPU;
- :mod:`toolchains.sass` reads the machine code and checks it for what a test on the host can't see.
"""
