// A thread as translated PTX sees it (build_support/ptx). Translated files include this header and
// arithmetic.h only, so they compile quickly and do not depend on how the emulator was built.
//
// Addresses are those of PTX: global and generic ones are pointers of the host, those of parameters
// offsets, and shared ones offsets in the block's static shared memory or, from kDynamicShared on,
// in its dynamic shared memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>

namespace specdec::ptx {

using Location = std::source_location;

enum Space { kGlobal, kShared, kGeneric };
enum Order { kRelaxed, kAcquireRelease };

constexpr uint64_t kDynamicShared = 1 << 20;

// A result and whether it is valid, or another predicate.
struct Result {
  uint32_t first;
  bool second;
};

class Thread {
 public:
  uint32_t tid_x, ntid_x, ctaid_x, ctaid_y, nctaid_x, nctaid_y;

  uint32_t laneid() const { return tid_x % 32; }

  // Parameters.
  template <typename T>
  T param(size_t offset) const {
    T value;
    std::memcpy(&value, params_ + offset, sizeof(T));
    return value;
  }
  uint64_t param_address(size_t offset) const {
    return reinterpret_cast<uint64_t>(params_ + offset);
  }

  // Memory.
  template <typename T>
  T load(Space space, uint64_t address, Location where = Location::current()) {
    T value;
    load_bytes(space, address, &value, sizeof(T), where);
    return value;
  }
  template <typename T>
  void store(Space space, uint64_t address, const T& value, Location where = Location::current()) {
    store_bytes(space, address, &value, sizeof(T), where);
  }
  // Only one thread runs at a time, so after its checks an atomic operation is an ordinary one.
  template <typename T, typename Change>
  T atomic(Space space, uint64_t address, Order order, const Change& change,
           Location where = Location::current()) {
    T* const target = static_cast<T*>(begin_atomic(space, address, sizeof(T), order, where));
    const T old = *target;
    *target = static_cast<T>(change(old));
    return old;
  }
  template <typename T>
  T load_atomic(uint64_t address, Order order, Location where = Location::current()) {
    return static_cast<T>(load_atomic_bits(address, sizeof(T), order, where));
  }
  template <typename T>
  void store_release(uint64_t address, T value, Location where = Location::current()) {
    *static_cast<T*>(begin_store_release(address, sizeof(T), where)) = value;
  }
  virtual uint64_t generic_address(uint64_t shared, Location where = Location::current()) = 0;
  virtual uint64_t shared_address(uint64_t generic, Location where = Location::current()) = 0;

  // Other threads. Barrier 0 with 0 threads is that of the block.
  virtual void barrier(uint32_t id, uint32_t num_threads, Location where = Location::current()) = 0;
  virtual void warp_barrier(uint32_t lanes, Location where = Location::current()) = 0;
  virtual void fence() = 0;
  virtual void proxy_fence() = 0;
  virtual Result shuffle_index(uint32_t value, uint32_t lane, uint32_t clamp, uint32_t lanes,
                               Location where = Location::current()) = 0;
  virtual Result shuffle_xor(uint32_t value, uint32_t mask, uint32_t clamp, uint32_t lanes,
                             Location where = Location::current()) = 0;
  virtual Result shuffle_up(uint32_t value, uint32_t distance, uint32_t clamp, uint32_t lanes,
                            Location where = Location::current()) = 0;
  virtual Result shuffle_down(uint32_t value, uint32_t distance, uint32_t clamp, uint32_t lanes,
                              Location where = Location::current()) = 0;
  virtual uint32_t vote(bool predicate, uint32_t lanes, Location where = Location::current()) = 0;
  virtual Result elect(uint32_t lanes, Location where = Location::current()) = 0;
  virtual uint32_t reduce(uint32_t value, uint32_t lanes, uint32_t (*combine)(uint32_t, uint32_t),
                          Location where = Location::current()) = 0;
  [[noreturn]] virtual void trap(Location where = Location::current()) = 0;

  // Asynchronous copies. Of `bytes` bytes the first `valid` ones are read, and the rest is zero.
  virtual void copy(uint64_t shared, uint64_t global, uint32_t bytes, uint32_t valid,
                    Location where = Location::current()) = 0;
  virtual void commit_copies() = 0;
  virtual void wait_copies(uint32_t num_groups) = 0;
  virtual void bulk_copy(uint64_t shared, uint64_t global, uint32_t bytes, uint64_t barrier,
                         Location where = Location::current()) = 0;
  virtual void mbarrier_init(uint64_t barrier, uint32_t count,
                             Location where = Location::current()) = 0;
  virtual uint64_t mbarrier_arrive(uint64_t barrier, uint32_t bytes,
                                   Location where = Location::current()) = 0;
  virtual bool mbarrier_wait(uint64_t barrier, uint32_t parity,
                             Location where = Location::current()) = 0;

  // Tensor cores.
  virtual std::array<uint32_t, 4> ldmatrix(uint64_t row, bool transposed,
                                           Location where = Location::current()) = 0;
  virtual std::array<float, 4> mma_f16(const std::array<uint32_t, 4>& a,
                                       const std::array<uint32_t, 2>& b,
                                       const std::array<uint32_t, 4>& c,
                                       Location where = Location::current()) = 0;
  virtual std::array<float, 4> mma_bf16(const std::array<uint32_t, 4>& a,
                                        const std::array<uint32_t, 2>& b,
                                        const std::array<uint32_t, 4>& c,
                                        Location where = Location::current()) = 0;

  // The result of an approximate instruction whose exact value is `exact`.
  virtual float approximate(float exact) = 0;

 protected:
  explicit Thread(const std::byte* params) : params_(params) {}
  ~Thread() = default;

  virtual void load_bytes(Space space, uint64_t address, void* value, size_t bytes,
                          Location where) = 0;
  virtual void store_bytes(Space space, uint64_t address, const void* value, size_t bytes,
                           Location where) = 0;
  virtual void* begin_atomic(Space space, uint64_t address, size_t bytes, Order order,
                             Location where) = 0;
  virtual uint64_t load_atomic_bits(uint64_t address, size_t bytes, Order order,
                                    Location where) = 0;
  virtual void* begin_store_release(uint64_t address, size_t bytes, Location where) = 0;

 private:
  const std::byte* params_;
};

struct Param {
  uint32_t offset, bytes, alignment;
};

// A kernel of a PTX file. Its library exports it as ptx_<name>.
struct Entry {
  const char* name;  // mangled, as by the host's compiler
  void (*run)(Thread& thread);
  uint32_t static_shared_bytes;
  const Param* params;
  uint32_t num_params;
};

}  // namespace specdec::ptx

#define SPECDEC_PTX_ENTRY extern __attribute__((visibility("default")))
