#include "substitute.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "emulated_thread.h"
#include "testing/emulation/threads/block.h"

namespace specdec::emulation {
namespace {

std::string demangled(const char* name) {
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, nullptr), std::free);
  return text ? text.get() : name;
}

std::string layout(size_t bytes, size_t alignment) {
  return std::to_string(bytes) + " bytes aligned to " + std::to_string(alignment);
}

// The arguments, each where nvcc expects it.
std::vector<std::byte> lay_out(const ptx::Entry& entry, std::span<const Argument> arguments) {
  const auto fail = [&](const std::string& what) {
    throw EmulationError("PTX of " + demangled(entry.name) + ": " + what);
  };
  if (arguments.size() != entry.num_params) {
    fail("nvcc has " + std::to_string(entry.num_params) + " parameters, the host's compiler " +
         std::to_string(arguments.size()));
  }
  const ptx::Param& last = entry.params[entry.num_params - 1];
  std::vector<std::byte> params(last.offset + last.bytes);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const ptx::Param& param = entry.params[i];
    const Argument& argument = arguments[i];
    if (param.bytes != argument.bytes || param.alignment != argument.alignment) {
      fail("parameter " + std::to_string(i) + " has " + layout(param.bytes, param.alignment) +
           " for nvcc, " + layout(argument.bytes, argument.alignment) + " for the host's compiler");
    }
    std::memcpy(params.data() + param.offset, argument.value, argument.bytes);
  }
  return params;
}

}  // namespace

void substitute(const void* kernel, std::span<const Argument> arguments, Launch& launch) {
  launched.insert(kernel);
  if (substitutes.empty()) return;
  const auto found = std::find_if(substitutes.begin(), substitutes.end(),
                                  [&](const Substitute& each) { return each.kernel == kernel; });
  if (found == substitutes.end()) {
    throw EmulationError("no PTX of the kernel that is launched at " + file_and_line(launch.where));
  }
  run_entry(*found->entry, lay_out(*found->entry, arguments), launch);
}

void run_entry(const ptx::Entry& entry, std::span<const std::byte> params, Launch& launch) {
  // Kernels may load vectors of 16 bytes from their parameters.
  struct alignas(16) Chunk {
    std::byte bytes[16];
  };
  auto memory = std::make_shared<std::vector<Chunk>>((params.size() + 15) / 16 + 1);
  std::memcpy(memory->data(), params.data(), params.size());
  auto name = std::make_shared<std::string>("PTX of " + demangled(entry.name));
  launch.shared_memory_counts_as_written = true;
  launch.kernel = [&entry, memory, name] {
    Grid::current().name_kernel(name->c_str());
    EmulatedThread thread(entry, memory->data()->bytes);
    entry.run(thread);
  };
}

}  // namespace specdec::emulation

// For tests (python_tests/helpers/ops/emulation.py).
#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))

// Null and 0: the kernels of the host run.
SPECDEC_EXPORT void specdec_set_substitutes(const specdec::emulation::Substitute* substitutes,
                                            size_t count) {
  specdec::emulation::substitutes = {substitutes, count};
}
SPECDEC_EXPORT void specdec_set_approximation_error(int units) {
  specdec::emulation::approximation_error = units;
}
// Writes the kernels that were launched since the last call to `kernels`, at most `capacity` of
// them, and returns their number.
SPECDEC_EXPORT size_t specdec_take_launched(const void** kernels, size_t capacity) {
  std::set<const void*>& launched = specdec::emulation::launched;
  const size_t count = launched.size();
  std::copy_n(launched.begin(), std::min(count, capacity), kernels);
  launched.clear();
  return count;
}
// Returns the number of bulk copies of all launches.
SPECDEC_EXPORT int64_t specdec_num_bulk_copies() { return specdec::Emulation::num_bulk_copies; }
// Launches an entry; returns the error message, or null. The message lives until the next call.
SPECDEC_EXPORT const char* specdec_launch_entry(const specdec::ptx::Entry* entry, unsigned grid_x,
                                                unsigned block, int64_t dynamic_shared_bytes,
                                                const std::byte* params, size_t params_bytes) {
  static std::string message;
  specdec::emulation::Launch launch{.kernel = {},
                                    .grid_x = grid_x,
                                    .grid_y = 1,
                                    .block = block,
                                    .dynamic_shared_bytes = dynamic_shared_bytes,
                                    .cooperative = true,
                                    .where = specdec::emulation::Location::current()};
  specdec::emulation::run_entry(*entry, {params, params_bytes}, launch);
  try {
    specdec::emulation::Grid::run(launch);
  } catch (const specdec::EmulationError& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}
