// The ring of weights in a block's shared memory.
//
// A stage holds a slice of the rows of one tile. Stages come in the order in which they are used:
// of each product its panels, of a panel its slices, of a slice its tiles. Weights are never
// written, so a stage can be filled as soon as it is free, whatever phase its weights belong to:
// while the grid is at a barrier the ring fills with what comes after it.
//
// full[stage] completes when the bytes are there, empty[stage] when all warps are done with them;
// everybody counts rounds through the ring alike, and the parity of a round tells its phase from
// the one before. Warp 0 fills: each time it is done with a stage it refills the one that it was
// done with kLag stages ago, which the others should be done with by then. With bulk copies (sm_90)
// the hardware counts the bytes. With cp.async the lanes wait for their own copies, kUnannounced
// stages behind the newest, and one arrives for all.
//
// Where the next stage comes from is kept in shared memory, because only warp 0 needs it and
// registers are short.
#pragma once

#include "draft_block.cuh"

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
        panel(static_cast<int>(tiles.first_tile(block, num_blocks))),
        tile(panel),
        end(static_cast<int>(tiles.first_tile(block + 1, num_blocks))),
        slice(0) {}

  __device__ __forceinline__ bool is_done() const { return panel >= end; }
  __device__ __forceinline__ StageRows rows() const {
    return {weight + tiles.first_out(tile) * row_bytes + slice, tiles.num_outs(tile),
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

// The ring as a warp sees it. Source, which all stages come from:
//
//   bool is_done() const, StageRows rows() const, void next(const DraftBlock<T>&)
template <typename T, typename Source>
class Ring {
 public:
  // What warp 0 keeps in shared memory.
  struct Writer {
    Source source;
    RingPosition at;
    RingPosition oldest;  // of cp.async, that nobody was told of
    int num_unannounced;
  };
  static constexpr int kLag = 2;
  static constexpr int kUnannounced = 2;
  static constexpr int kMinStages = kLag + kUnannounced + 1;

  // By all warps together; `source` begins with the first stage. Ends with a barrier.
  __device__ __forceinline__ Ring(const DraftBlock<T>& block, SharedValue<Writer>& writer,
                                  bool has_bulk_copies, const Source& source)
      : block_(block), writer_(writer), has_bulk_copies_(has_bulk_copies) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < block.num_stages) {
      mbarrier_init(&block.shared.full[thread], 1);
      mbarrier_init(&block.shared.empty[thread], kDraftWarps);
    }
    block.sync();  // the mbarriers are there
    if (block.warp() > 0) return;
    Writer all{source, {0, 0}, {0, 0}, 0};
    for (int i = 0; i < block.num_stages; ++i) fill(all);
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
    if (block_.warp() > 0) return;
    if (num_released_ < kLag) {
      ++num_released_;
      return;
    }
    Writer all = writer_;
    warp_barrier();  // all lanes have read it
    fill(all);
    keep(all);
  }

 private:
  __device__ __forceinline__ void keep(const Writer& all) {
    if (block_.lane() == 0) writer_ = all;
    warp_barrier();
  }

  // The next stage, if there is one more.
  __device__ __forceinline__ void fill(Writer& all) {
    if (all.source.is_done()) {
      if (has_bulk_copies_) return;
      cp_async_wait<0>();
      while (all.num_unannounced > 0) announce(all);
      return;
    }
    // In the first round no stage has been used: the phase before the first counts as complete.
    mbarrier_wait(&block_.shared.empty[all.at.stage], all.at.parity ^ 1);
    const StageRows rows = all.source.rows();
    const SharedSpan<unsigned char> stage =
        block_.stages.subspan(all.at.stage * kStageBytes, kStageBytes);
    if (has_bulk_copies_) {
      copy_bulk(stage, rows, &block_.shared.full[all.at.stage]);
    } else {
      copy_in_pieces(stage, rows);
      if (++all.num_unannounced > kUnannounced) {
        cp_async_wait<kUnannounced>();
        announce(all);
      }
    }
    all.at.advance(block_.num_stages);
    all.source.next(block_);
  }

  __device__ __forceinline__ void copy_bulk(const SharedSpan<unsigned char>& stage,
                                            const StageRows& rows, Mbarrier* full) {
    const int row = block_.lane();
    if (row == 0) mbarrier_arrive_expect(full, rows.num_rows * rows.bytes);
    warp_barrier();
    if (row < rows.num_rows) {
      bulk_copy(stage.pointer(row * kStageRowBytes), rows.first + row * rows.stride, rows.bytes,
                full);
    }
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

  const DraftBlock<T>& block_;
  SharedValue<Writer>& writer_;
  const bool has_bulk_copies_;
  RingPosition at_{0, 0};
  int num_released_ = 0;  // up to kLag
};

}  // namespace specdec
