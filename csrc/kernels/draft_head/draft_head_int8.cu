// draft_head in the two 16-bit types, with 8-bit integer weights.
#include "draft_head.cuh"

namespace specdec {

template struct DraftLaunch<__nv_bfloat16, Int8>;
template struct DraftLaunch<__half, Int8>;

}  // namespace specdec
