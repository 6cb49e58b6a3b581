"""Translates the PTX of nvcc to C++, which the emulator of the tests runs (docs/internals/ptx.md).

``syntax.py`` reads PTX, ``opcodes.py`` is the table of what each instruction does, and ``cpp.py`` writes C++.
"""
