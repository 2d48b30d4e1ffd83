#include "simd/copy.h"

#include <cstring>

namespace offload {
namespace {

constexpr std::size_t kGrainLeast = 128 << 10, kGrainMost = 1 << 20;
constexpr std::size_t kStreamFrom = 8 << 20;  // smaller copies are likely to be read from the cache

}  // namespace

void copy(void* dst, const void* src, std::size_t nbytes, ThreadPool& pool, Level level) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const Kernels& kernels = kernels_of(level);
  const bool stream = nbytes >= kStreamFrom;
  pool.for_ranges(nbytes, pool.grain(nbytes, kGrainLeast, kGrainMost), [&](std::size_t at, std::size_t count) {
    if (stream)
      kernels.stream_copy(to + at, from + at, count);
    else
      std::memcpy(to + at, from + at, count);
  });
}

}  // namespace offload
