// Runs translated PTX in place of kernels that the host's compiler compiled.
#pragma once

#include <cstddef>
#include <set>
#include <span>

#include "testing/emulation/ptx/thread.h"
#include "testing/emulation/threads/grid.h"

namespace specdec::emulation {

// A kernel of the host, and the PTX that runs when it is launched.
struct Substitute {
  const void* kernel;
  const ptx::Entry* entry;
};

// While this is not empty, every launched kernel must have an entry.
inline std::span<const Substitute> substitutes;

// The kernels that were launched since a test emptied this set.
inline std::set<const void*> launched;

// Moves the results of ex2.approx and lg2.approx by up to this many units in the last place: the
// instructions have an error, which differs from that of the host's functions.
inline int approximation_error = 0;

// An argument of a launch, as the host's compiler lays it out.
struct Argument {
  const void* value;
  size_t bytes, alignment;
};

// Notes the kernel of `launch`, and replaces it if there are substitutes. Throws EmulationError if
// the kernel has none, or if the two compilers lay out its parameters differently.
void substitute(const void* kernel, std::span<const Argument> arguments, Launch& launch);

// Makes `launch` run an entry with parameters that are laid out as PTX says.
void run_entry(const ptx::Entry& entry, std::span<const std::byte> params, Launch& launch);

}  // namespace specdec::emulation
