// How tensor cores add. PTX does not specify it, and no GPU rounds as IEEE floating point does.
//
// NVIDIA's adders align the significands of all terms of a sum, the float32 addend included, to the
// largest exponent among them, cut off what is then below a number of fraction bits, add the rest
// exactly and round the sum towards zero. Fraction bits and terms per sum differ by GPU. The
// description is that of MMA-Sim (Xie et al. 2025, "MMA-Sim: Bit-Accurate Reference Model of Tensor
// Cores and Matrix Cores", arXiv 2511.10909), whose authors found equal bits on the GPUs named here.
#pragma once

namespace specdec::emulation {

// The adder of mma.m16n8k16 on 16-bit floats with float32 accumulators.
enum class TensorCore {
  kExact,   // rounds the exact sum once, to nearest; no GPU does
  kAmpere,  // sm_80 to sm_89: the first eight products, then the others; 24 fraction bits
  kHopper,  // sm_90 to sm_121: sixteen products at once; 25 fraction bits
};
inline TensorCore tensor_core = TensorCore::kExact;

// c plus the products of 16 pairs of numbers of a 16-bit type, whose normal numbers begin at
// 2^min_exponent.
float add_products(const float (&a)[16], const float (&b)[16], float c, int min_exponent);

}  // namespace specdec::emulation
