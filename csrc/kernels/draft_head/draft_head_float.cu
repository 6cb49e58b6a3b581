// draft_head in float32.
#include "draft_head.cuh"

namespace specdec {

template struct DraftLaunch<float, float>;

}  // namespace specdec
