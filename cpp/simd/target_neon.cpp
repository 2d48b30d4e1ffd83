// The kernels for one instruction set; see [Note: per-target code] in kernels.h.
#include <arm_neon.h>

#include "simd/kernels.h"

namespace offload {
namespace {

constexpr int kLanes = 16;
constexpr int kPair = 32;
constexpr std::size_t kLine = 64;
constexpr std::size_t kAheadBytes = 512;
constexpr std::uint32_t kNaN = 0x7fc00000u;

// clang-format off: each uses those before it
#include "simd/lanes_neon.inl"
#include "simd/body.inl"
#include "simd/body_adam.inl"
#include "simd/body_moments.inl"
#include "simd/body_update.inl"
#include "simd/body_land.inl"
// clang-format on

}  // namespace

const Kernels kernels_neon{adam, update, split, join, encode, decode, land, sumsq, convert, stream_copy};

}  // namespace offload
