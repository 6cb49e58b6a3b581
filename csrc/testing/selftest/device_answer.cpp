// A question that fails for one device does not change the stored answer for another.
#include "specdec/device/device_answer.h"

#include "check.h"

namespace specdec {

void test_device_answer() {
  DeviceAnswer<int> known;
  int asked = 0, answer = 0;
  const auto works = [&](int* given) {
    *given = 10 + ++asked;
    return cudaSuccess;
  };
  const auto fails = [&](int* given) {
    *given = -1;
    ++asked;
    return cudaErrorInvalidValue;
  };
  CHECK(known.get(0, works, &answer) == cudaSuccess && answer == 11);
  CHECK(known.get(0, works, &answer) == cudaSuccess && answer == 11 && asked == 1);
  CHECK(known.get(1, fails, &answer) == cudaErrorInvalidValue && answer == 11);
  CHECK(known.get(0, works, &answer) == cudaSuccess && answer == 11 && asked == 2);
  CHECK(known.get(1, works, &answer) == cudaSuccess && answer == 13);
}

}  // namespace specdec
