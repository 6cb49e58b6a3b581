// What the CUDA runtime answered about a device, kept for the next call on the same device.
#pragma once

#include <cuda_runtime_api.h>

namespace specdec {

// Holds the answer for the device that was asked about last with success. A failed question leaves
// it unchanged.
template <typename Answer>
class DeviceAnswer {
 public:
  // Calls `ask(Answer*)` unless the answer for `device` is stored. Writes `answer` on success.
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
