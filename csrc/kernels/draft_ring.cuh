// The ring of weights in a block's shared memory.
//
// A stage holds a slice, kSliceBytes of each row, of one tile. The producer warp fills stages in
// the order in which consumers take them: of each product its panels, of a panel its slices, of a
// slice its tiles. Weights are never written, so it waits for nothing but free stages, and while
// the grid is at a barrier the ring fills with what comes after it.
//
// full[stage] completes when the bytes are there, empty[stage] when all consumer warps are done
// with them; both sides count rounds through the ring alike, and the parity of a round tells its
// phase from the one before. With bulk copies (sm_90) the hardware counts the bytes. With cp.async
// the producer's lanes wait for their own copies, kLag stages behind the newest, and one arrives
// for all.
#pragma once

#include "draft_block.cuh"

namespace specdec {

struct RingPosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance(int num_stages) {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename T>
__device__ __forceinline__ void init_ring(const DraftBlock<T>& block) {
  if (static_cast<int>(threadIdx.x) < block.num_stages) {
    mbarrier_init(&block.shared.full[threadIdx.x], 1);
    mbarrier_init(&block.shared.empty[threadIdx.x], kConsumerWarps);
  }
}

// A consumer warp's side.
template <typename T>
class RingReader {
 public:
  __device__ __forceinline__ explicit RingReader(const DraftBlock<T>& block) : block_(block) {}

  // The stage that comes next, once it is there.
  __device__ __forceinline__ SharedSpan<unsigned char> wait() {
    mbarrier_wait(&block_.shared.full[at_.stage], at_.parity);
    return block_.stages.subspan(at_.stage * kStageBytes, kStageBytes);
  }
  // The warp is done with it.
  __device__ __forceinline__ void release() {
    warp_barrier();
    if (block_.lane() == 0) mbarrier_arrive(&block_.shared.empty[at_.stage]);
    at_.advance(block_.num_stages);
  }

 private:
  const DraftBlock<T>& block_;
  RingPosition at_;
};

// The producer warp's side.
template <typename T>
class RingWriter {
 public:
  __device__ __forceinline__ RingWriter(const DraftBlock<T>& block, bool has_bulk_copies)
      : block_(block), has_bulk_copies_(has_bulk_copies) {}

  // `bytes` of each of `num_rows` rows, `stride` bytes apart.
  __device__ __forceinline__ void write(const unsigned char* rows, int num_rows, int64_t stride,
                                        int bytes) {
    // In the first round no stage has been read: the phase before the first counts as complete.
    mbarrier_wait(&block_.shared.empty[at_.stage], at_.parity ^ 1);
    const SharedSpan<unsigned char> stage =
        block_.stages.subspan(at_.stage * kStageBytes, kStageBytes);
    if (has_bulk_copies_) {
      copy_bulk(stage, rows, num_rows, stride, bytes);
    } else {
      copy_in_pieces(stage, rows, num_rows, stride, bytes);
    }
    at_.advance(block_.num_stages);
  }

  // Behind the last write.
  __device__ __forceinline__ void finish() {
    if (has_bulk_copies_) return;
    cp_async_wait<0>();
    while (num_unannounced_ > 0) announce();
  }

 private:
  static constexpr int kLag = 2;  // below the least number of stages

  __device__ __forceinline__ void copy_bulk(const SharedSpan<unsigned char>& stage,
                                            const unsigned char* rows, int num_rows, int64_t stride,
                                            int bytes) {
    Mbarrier* full = &block_.shared.full[at_.stage];
    const int row = block_.lane();
    if (row == 0) mbarrier_arrive_expect(full, num_rows * bytes);
    warp_barrier();
    if (row < num_rows) {
      bulk_copy(stage.pointer(row * kStageRowBytes), rows + row * stride, bytes, full);
    }
  }

  __device__ __forceinline__ void copy_in_pieces(const SharedSpan<unsigned char>& stage,
                                                 const unsigned char* rows, int num_rows,
                                                 int64_t stride, int bytes) {
    for (int row = 0; row < num_rows; ++row) {
      for (int at = block_.lane() * 16; at < bytes; at += kWarpSize * 16) {
        cp_async_16(stage.pointer(row * kStageRowBytes + at), rows + row * stride + at, true);
      }
    }
    cp_async_commit();
    if (++num_unannounced_ <= kLag) return;
    cp_async_wait<kLag>();
    announce();
  }

  // The oldest stage that consumers were not told of has landed.
  __device__ __forceinline__ void announce() {
    warp_barrier();  // for all lanes
    if (block_.lane() == 0) mbarrier_arrive(&block_.shared.full[oldest_.stage]);
    oldest_.advance(block_.num_stages);
    --num_unannounced_;
  }

  const DraftBlock<T>& block_;
  const bool has_bulk_copies_;
  RingPosition at_;
  RingPosition oldest_;
  int num_unannounced_ = 0;
};

}  // namespace specdec
