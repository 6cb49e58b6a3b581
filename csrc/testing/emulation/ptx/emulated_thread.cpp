#include "emulated_thread.h"

#include <cmath>
#include <string>

#include "specdec/device/cuda.cuh"
#include "substitute.h"
#include "testing/emulation/threads/warp.h"

namespace specdec::emulation {
namespace {

// Lanes of a shuffle are divided into segments; `clamp` has a mask of the lane bits that are fixed
// in a segment and the last lane that may be read (PTX ISA, shfl.sync).
struct Segment {
  int self, first, last, mask;

  Segment(uint32_t lane, uint32_t clamp)
      : self(static_cast<int>(lane)), mask(static_cast<int>(clamp >> 8 & 31)) {
    first = self & mask;
    last = first | (static_cast<int>(clamp & 31) & ~mask);
  }
};

[[noreturn]] void fail(const std::string& what) { Grid::current().fail(what); }

template <typename T>
std::array<float, 4> multiply_accumulate(const std::array<uint32_t, 4>& a,
                                         const std::array<uint32_t, 2>& b,
                                         const std::array<uint32_t, 4>& c, Location where) {
  const uint32_t left[4] = {a[0], a[1], a[2], a[3]}, right[2] = {b[0], b[1]};
  float sum[4];
  std::memcpy(sum, c.data(), sizeof(sum));
  mma_m16n8k16<T>(sum, left, right, where);
  return {sum[0], sum[1], sum[2], sum[3]};
}

}  // namespace

EmulatedThread::EmulatedThread(const ptx::Entry& entry, const std::byte* params)
    : Thread(params),
      block_(block()),
      static_shared_(nullptr),
      dynamic_shared_(block_.shared().dynamic_block()),
      static_bytes_(entry.static_shared_bytes),
      dynamic_bytes_(static_cast<size_t>(Grid::current().launch().dynamic_shared_bytes)) {
  if (static_bytes_ > 0) {
    static_shared_ = static_cast<std::byte*>(block_.shared().static_block(static_bytes_));
  }
  tid_x = threadIdx.x, ntid_x = blockDim.x;
  ctaid_x = blockIdx.x, ctaid_y = blockIdx.y;
  nctaid_x = gridDim.x, nctaid_y = gridDim.y;
}

std::byte* EmulatedThread::shared_pointer(uint64_t address, size_t bytes, const char* what,
                                          Location where) const {
  const bool is_dynamic = address >= ptx::kDynamicShared;
  const uint64_t offset = is_dynamic ? address - ptx::kDynamicShared : address;
  const size_t size = is_dynamic ? dynamic_bytes_ : static_bytes_;
  if (offset > size || bytes > size - offset) {
    fail(what + at(where) + ": " + std::to_string(bytes) + " bytes from byte " +
         std::to_string(offset) + " of " + (is_dynamic ? "dynamic" : "static") +
         " shared memory, which has " + std::to_string(size) + " bytes");
  }
  return (is_dynamic ? dynamic_shared_ : static_shared_) + offset;
}

void* EmulatedThread::access(ptx::Space space, uint64_t address, size_t bytes, AccessKind kind,
                             const char* what, Location where) {
  if (space == ptx::kShared) {
    std::byte* const pointer = shared_pointer(address, bytes, what, where);
    block_.shared().access(pointer, bytes, kind, where, bytes, what);
    return pointer;
  }
  void* const pointer = reinterpret_cast<void*>(address);
  check_aligned(pointer, bytes, what, where);
  if (space == ptx::kGeneric) block_.shared().access(pointer, bytes, kind, where);
  return pointer;
}

void EmulatedThread::load_bytes(ptx::Space space, uint64_t address, void* value, size_t bytes,
                                Location where) {
  const void* const pointer =
      access(space, address, bytes, AccessKind::kRead, "the address of a load", where);
  std::memcpy(value, pointer, bytes);
}

void EmulatedThread::store_bytes(ptx::Space space, uint64_t address, const void* value,
                                 size_t bytes, Location where) {
  void* const pointer =
      access(space, address, bytes, AccessKind::kWrite, "the address of a store", where);
  std::memcpy(pointer, value, bytes);
}

uint64_t EmulatedThread::generic_address(uint64_t shared, Location where) {
  return reinterpret_cast<uint64_t>(shared_pointer(shared, 0, "cvta.shared", where));
}

uint64_t EmulatedThread::shared_address(uint64_t generic, Location where) {
  const auto* const pointer = reinterpret_cast<const std::byte*>(generic);
  if (pointer >= static_shared_ && pointer <= static_shared_ + static_bytes_) {
    return static_cast<uint64_t>(pointer - static_shared_);
  }
  if (pointer >= dynamic_shared_ && pointer <= dynamic_shared_ + dynamic_bytes_) {
    return ptx::kDynamicShared + static_cast<uint64_t>(pointer - dynamic_shared_);
  }
  fail("cvta.to.shared" + at(where) + " of an address that is not in the block's shared memory");
}

void* EmulatedThread::begin_atomic(ptx::Space space, uint64_t address, size_t bytes,
                                   ptx::Order order, Location where) {
  void* const pointer =
      access(space, address, bytes, AccessKind::kAtomicUpdate, "the address of an atomic", where);
  block_.atomics().update(
      tid_x, pointer,
      order == ptx::kRelaxed ? MemoryOrder::kRelaxed : MemoryOrder::kAcquireRelease);
  return pointer;
}

// A thread that reads the same value again spins, so others must run.
uint64_t EmulatedThread::load_atomic_bits(uint64_t address, size_t bytes, ptx::Order order,
                                          Location where) {
  const void* const pointer = access(ptx::kGeneric, address, bytes, AccessKind::kAtomicRead,
                                     "the address of an atomic", where);
  if (order == ptx::kRelaxed) {
    block_.atomics().load_relaxed(tid_x, pointer, where);
  } else {
    block_.atomics().load_acquire(tid_x, pointer);
  }
  uint64_t value = 0;
  std::memcpy(&value, pointer, bytes);
  if (polled_address_ == address && polled_value_ == value) {
    Grid::current().poll({.what = "an atomic load", .where = where}, !is_polling_);
    is_polling_ = true;
  } else {
    is_polling_ = false;
  }
  polled_address_ = address;
  polled_value_ = value;
  return value;
}

void* EmulatedThread::begin_store_release(uint64_t address, size_t bytes, Location where) {
  void* const pointer = access(ptx::kGeneric, address, bytes, AccessKind::kAtomicUpdate,
                               "the address of an atomic", where);
  block_.atomics().store_release(tid_x, pointer);
  return pointer;
}

void EmulatedThread::barrier(uint32_t id, uint32_t num_threads, Location where) {
  if (id == 0 && num_threads == 0) return block_.barrier(where);
  block_.named_barrier(static_cast<int>(id), static_cast<int>(num_threads), where);
}

void EmulatedThread::warp_barrier(uint32_t lanes, Location where) {
  emulation::warp_barrier(lanes, where);
}

void EmulatedThread::fence() { thread_fence(); }

void EmulatedThread::proxy_fence() { block_.copies().proxy_fence(); }

ptx::Result EmulatedThread::shuffle(uint32_t value, int source, bool is_valid, uint32_t lanes,
                                    Location where) {
  const int lane = is_valid ? source : static_cast<int>(laneid());
  const uint64_t bits = emulation::shuffle("shfl.sync", value, lane, lanes, where);
  return {static_cast<uint32_t>(bits), is_valid};
}

ptx::Result EmulatedThread::shuffle_index(uint32_t value, uint32_t lane, uint32_t clamp,
                                          uint32_t lanes, Location where) {
  const Segment segment(laneid(), clamp);
  const int source = segment.first | (static_cast<int>(lane & 31) & ~segment.mask);
  return shuffle(value, source, source <= segment.last, lanes, where);
}

ptx::Result EmulatedThread::shuffle_xor(uint32_t value, uint32_t mask, uint32_t clamp,
                                        uint32_t lanes, Location where) {
  const Segment segment(laneid(), clamp);
  const int source = segment.self ^ static_cast<int>(mask & 31);
  return shuffle(value, source, source <= segment.last, lanes, where);
}

ptx::Result EmulatedThread::shuffle_up(uint32_t value, uint32_t distance, uint32_t clamp,
                                       uint32_t lanes, Location where) {
  const Segment segment(laneid(), clamp);
  const int source = segment.self - static_cast<int>(distance & 31);
  return shuffle(value, source, source >= segment.last, lanes, where);
}

ptx::Result EmulatedThread::shuffle_down(uint32_t value, uint32_t distance, uint32_t clamp,
                                         uint32_t lanes, Location where) {
  const Segment segment(laneid(), clamp);
  const int source = segment.self + static_cast<int>(distance & 31);
  return shuffle(value, source, source <= segment.last, lanes, where);
}

uint32_t EmulatedThread::vote(bool predicate, uint32_t lanes, Location where) {
  return emulation::vote("vote.sync", predicate, lanes, where);
}

// It orders no memory.
ptx::Result EmulatedThread::elect(uint32_t lanes, Location where) {
  const uint32_t present = emulation::vote("elect.sync", true, lanes, where);
  const uint32_t leader = static_cast<uint32_t>(std::countr_zero(present));
  return {leader, leader == laneid()};
}

uint32_t EmulatedThread::reduce(uint32_t value, uint32_t lanes,
                                uint32_t (*combine)(uint32_t, uint32_t), Location where) {
  return emulation::reduce("redux.sync", value, combine, lanes, where);
}

void EmulatedThread::trap(Location where) { fail("trap" + at(where)); }

void EmulatedThread::copy(uint64_t shared, uint64_t global, uint32_t bytes, uint32_t valid,
                          Location where) {
  if (bytes != 16 || (valid != 0 && valid != 16)) {
    fail("cp.async" + at(where) + " of " + std::to_string(valid) + " of " + std::to_string(bytes) +
         " bytes; the emulator copies 16 bytes or sets them to zero");
  }
  cp_async_16(shared_pointer(shared, 16, "cp.async", where), reinterpret_cast<const void*>(global),
              valid == 16, where);
}

void EmulatedThread::commit_copies() { block_.copies().commit(); }

void EmulatedThread::wait_copies(uint32_t num_groups) {
  block_.copies().wait_groups(static_cast<int>(num_groups));
}

void EmulatedThread::bulk_copy(uint64_t shared, uint64_t global, uint32_t bytes, uint64_t barrier,
                               Location where) {
  block_.copies().bulk_copy(shared_pointer(shared, bytes, "cp.async.bulk", where),
                            reinterpret_cast<const void*>(global), static_cast<int>(bytes),
                            shared_pointer(barrier, 8, "an mbarrier", where), where);
}

void EmulatedThread::mbarrier_init(uint64_t barrier, uint32_t count, Location where) {
  block_.copies().init(shared_pointer(barrier, 8, "an mbarrier", where), static_cast<int>(count),
                       where);
}

uint64_t EmulatedThread::mbarrier_arrive(uint64_t barrier, uint32_t bytes, Location where) {
  block_.copies().arrive(shared_pointer(barrier, 8, "an mbarrier", where), static_cast<int>(bytes),
                         where);
  return 0;  // no kernel uses the state
}

bool EmulatedThread::mbarrier_wait(uint64_t barrier, uint32_t parity, Location where) {
  block_.copies().wait(shared_pointer(barrier, 8, "an mbarrier", where), static_cast<int>(parity),
                       where);
  return true;
}

std::array<uint32_t, 4> EmulatedThread::ldmatrix(uint64_t row, bool transposed, Location where) {
  uint32_t r[4];
  emulation::ldmatrix("ldmatrix", r, shared_pointer(row, 16, "the row of ldmatrix", where),
                      transposed, where);
  return {r[0], r[1], r[2], r[3]};
}

std::array<float, 4> EmulatedThread::mma_f16(const std::array<uint32_t, 4>& a,
                                             const std::array<uint32_t, 2>& b,
                                             const std::array<uint32_t, 4>& c, Location where) {
  return multiply_accumulate<__half>(a, b, c, where);
}

std::array<float, 4> EmulatedThread::mma_bf16(const std::array<uint32_t, 4>& a,
                                              const std::array<uint32_t, 2>& b,
                                              const std::array<uint32_t, 4>& c, Location where) {
  return multiply_accumulate<__nv_bfloat16>(a, b, c, where);
}

// The direction depends on the bits of the value alone, so that a launch is repeatable.
float EmulatedThread::approximate(float exact) {
  // Zero, 1 and the special values are exact on the hardware, too.
  if (!std::isnormal(exact) || exact == 1) return exact;
  const uint32_t bits = std::bit_cast<uint32_t>(exact);
  const bool is_away_from_zero = bits * 0x9E3779B9u >> 31 != 0;
  const uint32_t units = static_cast<uint32_t>(approximation_error);
  return std::bit_cast<float>(is_away_from_zero ? bits + units : bits - units);
}

}  // namespace specdec::emulation
