// draft_head in the two 16-bit types, with e4m3 weights.
#include "draft_head.cuh"

namespace specdec {

template struct DraftLaunch<__nv_bfloat16, Float8>;
template struct DraftLaunch<__half, Float8>;

}  // namespace specdec
