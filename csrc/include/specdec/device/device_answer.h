// What the runtime has answered about a device, kept for the next call there.
#pragma once

#include <cuda_runtime_api.h>

namespace specdec {

// Holds the answer for one device, that of the last question that succeeded: another device that
// fails leaves it as it is.
template <typename Answer>
class DeviceAnswer {
 public:
  // `ask(Answer*)` is called unless the answer for `device` is here. Writes `answer` on success.
  template <typename Ask>
  cudaError_t get(int device, const Ask& ask, Answer* answer) {
    if (device != device_) {
      Answer given{};
      const cudaError_t error = ask(&given);
      if (error != cudaSuccess) return error;
      answer_ = given;
      device_ = device;
    }
    *answer = answer_;
    return cudaSuccess;
  }

 private:
  int device_ = -1;
  Answer answer_{};
};

}  // namespace specdec
