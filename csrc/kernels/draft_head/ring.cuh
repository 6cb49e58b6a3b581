// The ring of weights in a block's shared memory.
//
// A stage holds a slice of the rows of one tile. Stages come in the order in which they are used:
// of each product its panels, of a panel its slices, of a slice its tiles. Weights are never
// written, so a stage can be filled as soon as it is free, whatever phase its weights belong to:
// while the grid is at a barrier the ring fills with what comes after it.
//
// full[stage] completes when the bytes are there, empty[stage] when all warps are done with them;
// everybody counts rounds through the ring alike, and the parity of a round tells its phase from
// the one before. Warp 0 fills: after every kRefillTiles tiles it refills the stages that it is
// done with but for the last kLag, which the others should be done with by then. With bulk copies
// (sm_90) the hardware counts the bytes. With cp.async the lanes wait for their own copies,
// kUnannounced stages behind the newest, and one arrives for all.
//
// Where the next stages come from is kept in shared memory, because only warp 0 needs it and
// registers are short: apart what every refill needs and what a new product needs.
#pragma once

#include "block.cuh"

namespace specdec {

// A place in the ring.
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

// What a stage holds: `bytes` of each of `num_rows` rows, `stride` bytes apart.
struct StageRows {
  const unsigned char* first;
  int num_rows;
  int bytes;
  int64_t stride;
};

// The stages of a matrix that a block takes, in order.
struct MatrixStages {
  const unsigned char* weight;
  TileSchedule tiles;
  int row_bytes;
  int slice_bytes;  // of a stage's row
  int panel;        // its first tile
  int tile;
  int end;  // of the block's tiles
  int slice;

  MatrixStages() = default;
  __device__ __forceinline__ MatrixStages(const DraftMatrix& matrix, bool is_paired,
                                          int weight_bytes, int slice, int block, int num_blocks)
      : weight(static_cast<const unsigned char*>(matrix.weight)),
        tiles{matrix.outs, is_paired},
        row_bytes(matrix.ins * weight_bytes),
        slice_bytes(slice),
        panel(tiles.first_tile(block, num_blocks)),
        tile(panel),
        end(tiles.first_tile(block + 1, num_blocks)),
        slice(0) {}

  __device__ __forceinline__ bool is_done() const { return panel >= end; }
  __device__ __forceinline__ StageRows rows() const {
    return {weight + int64_t{tiles.first_out(tile)} * row_bytes + slice, tiles.num_outs(tile),
            min(row_bytes - slice, slice_bytes), row_bytes};
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

// The ring as a warp sees it. Source, which all stages come from, has one function:
//
//   bool next(const DraftBlock<T>&, MatrixStages& stages)
//
// which gives the stages of the next product of which the block has any, or false behind the last.
template <typename T, typename Source>
class Ring {
 public:
  // What a refill needs. Stages that are done are behind the last product's.
  struct Writer {
    MatrixStages stages;
    RingPosition at;
    RingPosition oldest;  // of cp.async, that nobody was told of
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

  // By all warps together; `source` begins with the first product. Ends with a barrier.
  __device__ __forceinline__ Ring(const DraftBlock<T>& block, Memory& memory, bool has_bulk_copies,
                                  Source source)
      : block_(block), memory_(memory), copies_in_bulk_(copies_in_bulk(has_bulk_copies)) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < block.num_stages) {
      mbarrier_init(&block.shared.full[thread], 1);
      mbarrier_init(&block.shared.empty[thread], kDraftWarps);
    }
    block.sync();  // the mbarriers are there
    if (block.warp() > 0) return;
    if (block.lane() == 0) memory.source = source;
    warp_barrier();  // it is there
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
    ++num_released_;
  }

  // By every warp after every kRefillTiles stages of a slice. Goes no further than the product that
  // it is at: a step to the next one is long, and would be compiled into every turn of a loop.
  __device__ __forceinline__ void refill() { refill_from<false>(); }

  // By every warp behind the last stage of a slice. Goes on to the next products.
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

  // False behind the last one.
  __device__ __forceinline__ bool next_product(Writer& all) {
    Source source = memory_.source;
    warp_barrier();  // all lanes have read it
    const bool is_there = source.next(block_, all.stages);
    if (block_.lane() == 0) memory_.source = source;
    warp_barrier();
    return is_there;
  }

  // The next stage of the product.
  __device__ __forceinline__ void fill(Writer& all) {
    // In the first round no stage has been used: the phase before the first counts as complete.
    mbarrier_wait(&block_.shared.empty[all.at.stage], all.at.parity ^ 1);
    const StageRows rows = all.stages.rows();
    const SharedSpan<unsigned char> stage =
        block_.stages.subspan(all.at.stage * kStageBytes, kStageBytes);
    if (copies_in_bulk_) {
      copy_bulk(stage, rows, &block_.shared.full[all.at.stage]);
    } else {
      copy_in_pieces(stage, rows);
      if (++all.num_unannounced > kUnannounced) {
        cp_async_wait<kUnannounced>();
        announce(all);
      }
    }
    all.at.advance(block_.num_stages);
    all.stages.next();
  }

  __device__ __forceinline__ void copy_bulk(const SharedSpan<unsigned char>& stage,
                                            const StageRows& rows, Mbarrier* full) {
    if (elect_lane()) {
      mbarrier_arrive_expect(full, rows.num_rows * rows.bytes);
#pragma unroll
      for (int row = 0; row < kTileOuts; ++row) {
        if (row >= rows.num_rows) break;
        bulk_copy(stage.pointer(row * kStageRowBytes), rows.first + row * rows.stride, rows.bytes,
                  full);
      }
    }
    warp_barrier();
  }

  __device__ __forceinline__ void copy_in_pieces(const SharedSpan<unsigned char>& stage,
                                                 const StageRows& rows) {
    for (int row = 0; row < rows.num_rows; ++row) {
      for (int at = block_.lane() * 16; at < rows.bytes; at += kWarpSize * 16) {
        cp_async_16(stage.pointer(row * kStageRowBytes + at), rows.first + row * rows.stride + at,
                    true);
      }
    }
    cp_async_commit();
  }

  // The oldest stage that nobody was told of has landed, as far as each lane's copies go.
  __device__ __forceinline__ void announce(Writer& all) {
    warp_barrier();  // for all lanes
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
  int num_released_ = 0;  // of warp 0: stages that wait for a refill
};

}  // namespace specdec
