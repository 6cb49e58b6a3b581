// Places in a kernel's source, for messages.
#pragma once

#include <source_location>
#include <string>

namespace specdec::emulation {

using Location = std::source_location;

inline std::string file_and_line(Location where) {
  const std::string path = where.file_name();
  return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(where.line());
}

// Returns " (file:line)", or nothing if the place is unknown.
inline std::string at(Location where) {
  return where.line() == 0 ? "" : " (" + file_and_line(where) + ")";
}

}  // namespace specdec::emulation
