// The ring of weights in a block's shared memory.
//
// A stage holds a slice of the rows of one tile: one copy if the matrix is stored in tiles, else a
// copy of each row. Stages are filled in the order in which they are used: product by product,
// panel by panel, slice by slice, tile by tile. Weights are never written, so a stage can be filled
// as soon as it is free, for whichever phase its weights are. While the grid is at a barrier, the
// ring fills with the weights of the next phases.
//
// full[stage] completes when the bytes have landed, empty[stage] when all warps have read them. All
// warps count rounds through the ring in the same way; the parity of a round distinguishes its
// phase from the previous one. Warp 0 fills the ring: after every kRefillTiles tiles it refills the
// stages that it has released, except the last kLag, which the other warps may still be reading.
// With bulk copies (sm_90) the hardware counts the bytes. With cp.async each lane waits for its own
// copies, kUnannounced stages behind the newest one, and then one lane arrives for all.
//
// The source of the next stages is kept in shared memory, because only warp 0 needs it and
// registers are scarce. What every refill needs and what only a new product needs are kept
// separately.
#pragma once

#include "block.cuh"

namespace specdec {

// A position in the ring.
struct RingPosition {
  int stage;
  int parity;

  __device__ __forceinline__ void advance(int num_stages) {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What is copied into a stage: `count` pieces of `bytes` bytes, which are `stride` bytes apart in
// memory and kStageRowBytes in the stage.
struct StagePieces {
  const unsigned char* first;
  int count;
  int bytes;
  int64_t stride;
};

// The stages of a matrix that a block needs, in order.
struct MatrixStages {
  const unsigned char* weight;
  TileSchedule tiles;
  bool in_tiles;
  int row_bytes;
  int slice_bytes;  // bytes of a row in a stage
  int panel;        // first tile of the panel
  int tile;
  int end;  // end of the block's tiles
  int slice;

  MatrixStages() = default;
  __device__ __forceinline__ MatrixStages(const DraftMatrix& matrix, bool is_paired,
                                          int weight_bytes, int slice, int block, int num_blocks)
      : weight(static_cast<const unsigned char*>(matrix.weight)),
        tiles{matrix.outs, is_paired},
        in_tiles(matrix.in_tiles),
        row_bytes(matrix.row_bytes(weight_bytes)),
        slice_bytes(slice),
        panel(tiles.first_tile(block, num_blocks)),
        tile(panel),
        end(tiles.first_tile(block + 1, num_blocks)),
        slice(0) {}

  __device__ __forceinline__ bool is_done() const { return panel >= end; }
  __device__ __forceinline__ StagePieces pieces() const {
    const int bytes = min(row_bytes - slice, slice_bytes);
    if (in_tiles) {
      return {weight + (int64_t{tile} * row_bytes + slice) * kTileOuts, 1, bytes * kTileOuts, 0};
    }
    return {weight + int64_t{tiles.first_out(tile)} * row_bytes + slice, tiles.num_outs(tile),
            bytes, row_bytes};
  }
  __device__ __forceinline__ void next() {
    const int panel_end = min(panel + kPanelTiles, end);
    if (++tile < panel_end) return;
    tile = panel;
    slice += slice_bytes;
    if (slice < row_bytes) return;
    tile = panel = panel_end;
    slice = 0;
  }
};

// A warp's view of the ring. Source yields the stages; it has one function:
//
//   bool next(const DraftBlock<T>&, MatrixStages& stages)
//
// which sets `stages` to those of the block's next product, or returns false after the last one.
template <typename T, typename Source>
class Ring {
 public:
  // The state that every refill needs. `stages` is done after the last product.
  struct Writer {
    MatrixStages stages;
    RingPosition at;
    RingPosition oldest;  // oldest stage of cp.async that is not announced yet
    int num_unannounced;
  };
  // What warp 0 keeps in shared memory.
  struct Memory {
    SharedValue<Writer> writer;
    SharedValue<Source> source;
  };
  static constexpr int kLag = 2;
  static constexpr int kUnannounced = 2;
  static constexpr int kRefillTiles = 2;
  static constexpr int kMinStages = kRefillTiles + kLag + kUnannounced;

  // All warps call it together; `source` begins with the first product. Ends with a barrier.
  __device__ __forceinline__ Ring(const DraftBlock<T>& block, Memory& memory, bool has_bulk_copies,
                                  Source source)
      : block_(block), memory_(memory), copies_in_bulk_(copies_in_bulk(has_bulk_copies)) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < block.num_stages) {
      mbarrier_init(&block.shared.full[thread], 1);
      mbarrier_init(&block.shared.empty[thread], kDraftWarps);
    }
    block.sync();  // the mbarriers are initialised
    if (block.warp() > 0) return;
    if (block.lane() == 0) memory.source = source;
    warp_barrier();  // the source is stored
    Writer all{};
    for (int i = 0; i < block.num_stages; ++i) {
      if (all.stages.is_done() && !next_product(all)) {
        announce_all(all);
        break;
      }
      fill(all);
    }
    keep(all);
  }

  // Waits for the next stage and returns it.
  __device__ __forceinline__ SharedSpan<unsigned char> wait() {
    mbarrier_wait(&block_.shared.full[at_.stage], at_.parity);
    return block_.stages.subspan(at_.stage * kStageBytes, kStageBytes);
  }

  // Marks the stage as read by this warp.
  __device__ __forceinline__ void release() {
    warp_barrier();
    if (block_.lane() == 0) mbarrier_arrive(&block_.shared.empty[at_.stage]);
    at_.advance(block_.num_stages);
    ++num_released_;
  }

  // Every warp calls it after every kRefillTiles stages of a slice. Fills stages of the current
  // product only: going on to the next product is long code, which would be inlined into each
  // unrolled tile.
  __device__ __forceinline__ void refill() { refill_from<false>(); }

  // Every warp calls it after the last stage of a slice. Goes on to the next products.
  __device__ __forceinline__ void end_slice() { refill_from<true>(); }

 private:
  template <bool kGoesOn>
  __device__ __forceinline__ void refill_from() {
    if (block_.warp() > 0 || num_released_ <= kLag) return;
    Writer all = memory_.writer;
    warp_barrier();  // all lanes have read it
    for (; num_released_ > kLag; --num_released_) {
      if (all.stages.is_done()) {
        if (!kGoesOn || !next_product(all)) {
          announce_all(all);
          break;
        }
      }
      fill(all);
    }
    keep(all);
  }

  __device__ __forceinline__ void keep(const Writer& all) {
    if (block_.lane() == 0) memory_.writer = all;
    warp_barrier();
  }

  // Returns false after the last product.
  __device__ __forceinline__ bool next_product(Writer& all) {
    Source source = memory_.source;
    warp_barrier();  // all lanes have read it
    const bool is_there = source.next(block_, all.stages);
    if (block_.lane() == 0) memory_.source = source;
    warp_barrier();
    return is_there;
  }

  // Fills the next stage of the product.
  __device__ __forceinline__ void fill(Writer& all) {
    // In the first round no stage is in use yet: the phase before the first counts as complete.
    mbarrier_wait(&block_.shared.empty[all.at.stage], all.at.parity ^ 1);
    const StagePieces pieces = all.stages.pieces();
    const SharedSpan<unsigned char> stage =
        block_.stages.subspan(all.at.stage * kStageBytes, kStageBytes);
    if (copies_in_bulk_) {
      copy_bulk(stage, pieces, &block_.shared.full[all.at.stage]);
    } else {
      copy_by_lanes(stage, pieces);
      if (++all.num_unannounced > kUnannounced) {
        cp_async_wait<kUnannounced>();
        announce(all);
      }
    }
    all.at.advance(block_.num_stages);
    all.stages.next();
  }

  __device__ __forceinline__ void copy_bulk(const SharedSpan<unsigned char>& stage,
                                            const StagePieces& pieces, Mbarrier* full) {
    if (elect_lane()) {
      mbarrier_arrive_expect(full, pieces.count * pieces.bytes);
#pragma unroll
      for (int i = 0; i < kTileOuts; ++i) {
        if (i >= pieces.count) break;
        bulk_copy(stage.pointer(i * kStageRowBytes), pieces.first + i * pieces.stride, pieces.bytes,
                  full);
      }
    }
    warp_barrier();
  }

  __device__ __forceinline__ void copy_by_lanes(const SharedSpan<unsigned char>& stage,
                                                const StagePieces& pieces) {
    for (int i = 0; i < pieces.count; ++i) {
      for (int at = block_.lane() * 16; at < pieces.bytes; at += kWarpSize * 16) {
        cp_async_16(stage.pointer(i * kStageRowBytes + at), pieces.first + i * pieces.stride + at,
                    true);
      }
    }
    cp_async_commit();
  }

  // Announces the oldest unannounced stage, whose copies have landed in each lane.
  __device__ __forceinline__ void announce(Writer& all) {
    warp_barrier();  // in all lanes
    if (block_.lane() == 0) mbarrier_arrive(&block_.shared.full[all.oldest.stage]);
    all.oldest.advance(block_.num_stages);
    --all.num_unannounced;
  }

  __device__ __forceinline__ void announce_all(Writer& all) {
    if (copies_in_bulk_) return;
    cp_async_wait<0>();
    while (all.num_unannounced > 0) announce(all);
  }

  const DraftBlock<T>& block_;
  Memory& memory_;
  const bool copies_in_bulk_;
  RingPosition at_{0, 0};
  int num_released_ = 0;  // for warp 0: number of released stages that are not refilled
};

}  // namespace specdec
