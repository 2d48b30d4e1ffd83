// Element types of the kernels; the codes are part of the Python binding.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// Storage of one element; arithmetic is always on fp32.
struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

constexpr std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

}  // namespace offload
