// The emulator behind the interface of translated PTX (thread.h).
#pragma once

#include "testing/emulation/ptx/thread.h"
#include "testing/emulation/threads/block.h"

namespace specdec::emulation {

class EmulatedThread final : public ptx::Thread {
 public:
  EmulatedThread(const ptx::Entry& entry, const std::byte* params);

  uint64_t generic_address(uint64_t shared, Location where) override;
  uint64_t shared_address(uint64_t generic, Location where) override;
  void barrier(uint32_t id, uint32_t num_threads, Location where) override;
  void warp_barrier(uint32_t lanes, Location where) override;
  void fence() override;
  void proxy_fence() override;
  ptx::Result shuffle_index(uint32_t value, uint32_t lane, uint32_t clamp, uint32_t lanes,
                            Location where) override;
  ptx::Result shuffle_xor(uint32_t value, uint32_t mask, uint32_t clamp, uint32_t lanes,
                          Location where) override;
  ptx::Result shuffle_up(uint32_t value, uint32_t distance, uint32_t clamp, uint32_t lanes,
                         Location where) override;
  ptx::Result shuffle_down(uint32_t value, uint32_t distance, uint32_t clamp, uint32_t lanes,
                           Location where) override;
  uint32_t vote(bool predicate, uint32_t lanes, Location where) override;
  ptx::Result elect(uint32_t lanes, Location where) override;
  uint32_t reduce(uint32_t value, uint32_t lanes, uint32_t (*combine)(uint32_t, uint32_t),
                  Location where) override;
  [[noreturn]] void trap(Location where) override;
  void copy(uint64_t shared, uint64_t global, uint32_t bytes, uint32_t valid,
            Location where) override;
  void commit_copies() override;
  void wait_copies(uint32_t num_groups) override;
  void bulk_copy(uint64_t shared, uint64_t global, uint32_t bytes, uint64_t barrier,
                 Location where) override;
  void mbarrier_init(uint64_t barrier, uint32_t count, Location where) override;
  uint64_t mbarrier_arrive(uint64_t barrier, uint32_t bytes, Location where) override;
  bool mbarrier_wait(uint64_t barrier, uint32_t parity, Location where) override;
  std::array<uint32_t, 4> ldmatrix(uint64_t row, bool transposed, Location where) override;
  std::array<float, 4> mma_f16(const std::array<uint32_t, 4>& a, const std::array<uint32_t, 2>& b,
                               const std::array<uint32_t, 4>& c, Location where) override;
  std::array<float, 4> mma_bf16(const std::array<uint32_t, 4>& a, const std::array<uint32_t, 2>& b,
                                const std::array<uint32_t, 4>& c, Location where) override;
  float approximate(float exact) override;

 private:
  void load_bytes(ptx::Space space, uint64_t address, void* value, size_t bytes,
                  Location where) override;
  void store_bytes(ptx::Space space, uint64_t address, const void* value, size_t bytes,
                   Location where) override;
  void* begin_atomic(ptx::Space space, uint64_t address, size_t bytes, ptx::Order order,
                     Location where) override;
  uint64_t load_atomic_bits(uint64_t address, size_t bytes, ptx::Order order,
                            Location where) override;
  void* begin_store_release(uint64_t address, size_t bytes, Location where) override;

  // The host's pointer to an address, after the checks of an access of this kind.
  void* access(ptx::Space space, uint64_t address, size_t bytes, AccessKind kind, const char* what,
               Location where);
  std::byte* shared_pointer(uint64_t address, size_t bytes, const char* what, Location where) const;
  ptx::Result shuffle(uint32_t value, int source, bool is_valid, uint32_t lanes, Location where);

  Block& block_;
  std::byte *static_shared_, *dynamic_shared_;
  size_t static_bytes_, dynamic_bytes_;
  // The latest atomic load, to recognise spins.
  uint64_t polled_address_ = 0, polled_value_ = 0;
  bool is_polling_ = false;
};

}  // namespace specdec::emulation
