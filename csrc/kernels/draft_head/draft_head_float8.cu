// draft_head in the two 16-bit types with weights in e4m3.
#include "draft_head.cuh"

namespace specdec {

template struct DraftLaunch<__nv_bfloat16, Float8>;
template struct DraftLaunch<__half, Float8>;

}  // namespace specdec
