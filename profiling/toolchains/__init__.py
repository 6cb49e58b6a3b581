"""Compile every CUDA kernel with every supported compiler and check the results: ``make toolchains``.

- :mod:`toolchains.compilers` installs compilers from the package index;
- :mod:`toolchains.matrix` compiles every kernel with each of them for every architecture, without a GPU;
- :mod:`toolchains.sass` checks the machine code for errors that tests on the host can't find.
"""
