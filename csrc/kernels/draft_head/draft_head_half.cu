// draft_head in the two 16-bit types.
#include "draft_head.cuh"

namespace specdec {

template struct DraftLaunch<__nv_bfloat16, __nv_bfloat16>;
template struct DraftLaunch<__half, __half>;

}  // namespace specdec
