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
// phase from the previous one.
//
// With bulk copies (sm_90) the warps take turns: each fills every eighth stage, because a refill
// takes half as many instructions as the products of a stage, and the slowest warp sets the pace
// (one warp that filled all stages kept an H200 at 40 % of its bandwidth). The hardware counts the
// bytes. With cp.async, warp 0 fills all stages: each lane waits for its own copies, kUnannounced
// stages behind the newest one, and then one lane arrives for all.
//
// A warp refills stages that it has released, except the last lag(), which others may still be
// reading: after every slice, and if the ring has few stages, after every kTogether tiles.
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

  __device__ __forceinline__ void skip(int count, int num_stages) {
    for (stage += count; stage >= num_stages; stage -= num_stages) parity ^= 1;
  }
};

// What is copied into a stage: `count` pieces of `bytes` bytes, which are `stride` bytes apart in
// memory and kStageRowBytes in the stage.
struct StagePieces {
  const unsigned char* first;
  int count;
  int bytes;
  int stride;
};

// The stages of a matrix that a block needs, in order.
struct MatrixStages {
  const unsigned char* weight;
  TileSchedule tiles;
  bool in_tiles;
  int row_bytes;
  int slice_bytes;  // bytes of a row in a stage
  int end;          // end of the block's tiles
  int panel;        // first tile of the panel
  int panel_end;
  int tile;
  int slice;

  MatrixStages() = default;
  __device__ __forceinline__ MatrixStages(const DraftMatrix& matrix, bool is_paired,
                                          int weight_bytes, int slice, int block, int num_blocks)
      : weight(static_cast<const unsigned char*>(matrix.weight)),
        tiles{matrix.outs, is_paired},
        in_tiles(matrix.in_tiles),
        row_bytes(matrix.row_bytes(weight_bytes)),
        slice_bytes(slice),
        end(tiles.first_tile(block + 1, num_blocks)),
        panel(tiles.first_tile(block, num_blocks)),
        panel_end(min(panel + kPanelTiles, end)),
        tile(panel),
        slice(0) {}

  __device__ __forceinline__ bool is_done() const { return panel >= end; }

  // Goes on by `count` stages, at least one. Returns how many of them are left after the last one.
  __device__ __forceinline__ int advance(int count) {
    tile += count;
    while (tile >= panel_end) {
      tile -= panel_end - panel;
      slice += slice_bytes;
      if (slice < row_bytes) continue;
      slice = 0;
      tile += panel_end - panel;
      panel = panel_end;
      panel_end = min(panel + kPanelTiles, end);
      if (is_done()) return tile - panel;
    }
    return 0;
  }

  // Of the current stage.
  __device__ __forceinline__ StagePieces pieces() const {
    const int bytes = min(row_bytes - slice, slice_bytes);
    if (in_tiles) {
      return {weight + (int64_t{tile} * row_bytes + slice) * kTileOuts, 1, bytes * kTileOuts, 0};
    }
    return {weight + int64_t{tiles.first_out(tile)} * row_bytes + slice, tiles.num_outs(tile),
            bytes, row_bytes};
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
  // What a warp fills next.
  struct Writer {
    MatrixStages stages;  // done after the last product
    int num_skipped;      // stages of the next products before this warp's next one
    RingPosition at;
    RingPosition unannounced;  // the oldest stage of cp.async that is not announced
    int num_unannounced;
  };
  // What is in shared memory, because registers are scarce.
  struct Memory {
    SharedArray<Source, kDraftWarps> sources;  // the products after the current one, for each warp
    SharedValue<Writer> writer;                // without bulk copies: of warp 0, between refills
  };
  static constexpr int kTogether = 2;  // stages that a warp reads together
  static constexpr int kUnannounced = 2;
  static constexpr int kLeastLag = 2;
  static constexpr int kMinStages = kTogether + kLeastLag + kUnannounced;

  // All warps call it together; `source` begins with the first product. Ends with a barrier.
  __device__ __forceinline__ Ring(const DraftBlock<T>& block, Memory& memory, bool has_bulk_copies,
                                  const Source& source)
      : block_(block),
        memory_(memory),
        copies_in_bulk_(copies_in_bulk(has_bulk_copies)),
        stride_(copies_in_bulk_ ? kDraftWarps : 1),
        num_free_(block.num_stages) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < block.num_stages) {
      mbarrier_init(&block.shared.full[thread], 1);
      mbarrier_init(&block.shared.empty[thread], kDraftWarps);
    }
    if (block.lane() == 0) memory.sources[block.warp()] = source;
    writer_.at.skip(block.warp(), block.num_stages);
    writer_.num_skipped = block.warp();
    num_free_ -= block.warp();
    if (thread == 0) memory.writer = writer_;
    block.sync();  // the mbarriers are initialised, sources and writer stored
    fill_all<true>(0);
  }

  // Waits for the stage `ahead` stages after the next one, and returns it.
  __device__ __forceinline__ SharedSpan<unsigned char> wait(int ahead) {
    RingPosition at = at_;
    for (int i = 0; i < ahead; ++i) at.advance(block_.num_stages);
    mbarrier_wait(&block_.shared.full[at.stage], at.parity);
    return block_.stages.subspan(at.stage * kStageBytes, kStageBytes);
  }

  // Marks the next `count` stages, at most kTogether, as read by this warp.
  __device__ __forceinline__ void release(int count) {
    warp_barrier();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (i >= count) break;
      if (block_.lane() == i) mbarrier_arrive(&block_.shared.empty[at_.stage]);
      at_.advance(block_.num_stages);
    }
    num_free_ += count;
  }

  // Every warp calls it after kTogether stages of a slice. Fills stages of the current product
  // only: going on to the next product is long code, which would be inlined into each unrolled tile.
  __device__ __forceinline__ void refill() {
    if (block_.num_stages < 2 * kPanelTiles) fill_all<false>(lag());
  }

  // Every warp calls it after the last stage of a slice. Goes on to the next products.
  __device__ __forceinline__ void end_slice() { fill_all<true>(lag()); }

 private:
  // The number of stages that this warp has released and leaves to others, which may be behind it.
  __device__ __forceinline__ int lag() const { return max(kLeastLag, block_.num_stages / 4); }

  template <bool kGoesOn>
  __device__ __forceinline__ void fill_all(int lag) {
    if (block_.warp() >= stride_) return;
    if (copies_in_bulk_) return fill_free<kGoesOn>(lag);
    writer_ = memory_.writer;
    warp_barrier();  // all lanes have read it
    fill_free<kGoesOn>(lag);
    if (block_.lane() == 0) memory_.writer = writer_;
    warp_barrier();
  }

  // Fills this warp's stages that are free, except the last `lag` ones. Goes on to the next product
  // even if its stages are not free yet: refill() must find them in it.
  template <bool kGoesOn>
  __device__ __forceinline__ void fill_free(int lag) {
    while (true) {
      // Nothing may follow that would announce the last stages of a product.
      if (writer_.stages.is_done() && (!kGoesOn || !next_product())) return announce_all();
      if (num_free_ <= lag) return;
      fill();
    }
  }

  // Goes on to the product of this warp's next stage. Returns false after the last product.
  __device__ __forceinline__ bool next_product() {
    Source source = memory_.sources[block_.warp()];
    warp_barrier();  // all lanes have read it
    while (source.next(block_, writer_.stages) && writer_.num_skipped > 0) {
      writer_.num_skipped = writer_.stages.advance(writer_.num_skipped);
      if (!writer_.stages.is_done()) break;
    }
    if (block_.lane() == 0) memory_.sources[block_.warp()] = source;
    warp_barrier();
    return !writer_.stages.is_done();
  }

  // Fills this warp's next stage.
  __device__ __forceinline__ void fill() {
    // In the first round no stage is in use yet: the phase before the first counts as complete.
    mbarrier_wait(&block_.shared.empty[writer_.at.stage], writer_.at.parity ^ 1);
    const StagePieces pieces = writer_.stages.pieces();
    const SharedSpan<unsigned char> stage =
        block_.stages.subspan(writer_.at.stage * kStageBytes, kStageBytes);
    if (copies_in_bulk_) {
      copy_bulk(stage, pieces, &block_.shared.full[writer_.at.stage]);
    } else {
      copy_by_lanes(stage, pieces);
      if (++writer_.num_unannounced > kUnannounced) {
        cp_async_wait<kUnannounced>();
        announce();
      }
    }
    writer_.at.skip(stride_, block_.num_stages);
    num_free_ -= stride_;
    writer_.num_skipped = writer_.stages.advance(stride_);
  }

  __device__ __forceinline__ void copy_bulk(const SharedSpan<unsigned char>& stage,
                                            const StagePieces& pieces, Mbarrier* full) {
    if (elect_lane()) {
      mbarrier_arrive_expect(full, pieces.count * pieces.bytes);
      bulk_copy(stage.pointer(0), pieces.first, pieces.bytes, full);
#pragma unroll 1
      for (int i = 1; i < pieces.count; ++i) {
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
  __device__ __forceinline__ void announce() {
    warp_barrier();  // in all lanes
    if (block_.lane() == 0) mbarrier_arrive(&block_.shared.full[writer_.unannounced.stage]);
    writer_.unannounced.advance(block_.num_stages);
    --writer_.num_unannounced;
  }

  __device__ __forceinline__ void announce_all() {
    if (copies_in_bulk_) return;
    cp_async_wait<0>();
    while (writer_.num_unannounced > 0) announce();
  }

  const DraftBlock<T>& block_;
  Memory& memory_;
  const bool copies_in_bulk_;
  const int stride_;  // number of warps that take turns to fill stages
  Writer writer_{};
  // How many stages it has released, or nobody has used yet, from the next one that it fills on.
  int num_free_;
  RingPosition at_{0, 0};  // the stage that this warp reads next
};

}  // namespace specdec
