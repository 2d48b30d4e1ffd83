#include "simd/land.h"

#include "simd/copy.h"

namespace offload {
namespace {

const char* at(const void* base, Dtype dtype, std::size_t i) {
  return static_cast<const char*>(base) + i * bytes_of(dtype);
}
char* at(void* base, Dtype dtype, std::size_t i) { return static_cast<char*>(base) + i * bytes_of(dtype); }

std::size_t grain(const ThreadPool& pool, std::size_t n) { return pool.grain(n, 8 * kBlock, 32 * kBlock); }

}  // namespace

void land(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n, bool accumulate, float scale,
          double* block_sums, ThreadPool& pool, Level level) {
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t i, std::size_t count) {
    kernels.land(at(dst, dst_dtype, i), dst_dtype, at(src, src_dtype, i), src_dtype, count, accumulate, scale,
                 block_sums ? block_sums + i / kBlock : nullptr);
  });
}

void sumsq(const void* src, Dtype dtype, std::size_t n, double* block_sums, ThreadPool& pool, Level level) {
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t i, std::size_t count) {
    kernels.sumsq(at(src, dtype, i), dtype, count, block_sums + i / kBlock);
  });
}

void convert(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n, ThreadPool& pool,
             Level level) {
  if (dst_dtype == src_dtype) return copy(dst, src, n * bytes_of(dst_dtype), pool, level);
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t i, std::size_t count) {
    kernels.convert(at(dst, dst_dtype, i), dst_dtype, at(src, src_dtype, i), src_dtype, count);
  });
}

void scale(void* dst, Dtype dtype, std::size_t n, float factor, ThreadPool& pool, Level level) {
  land(dst, dtype, dst, dtype, n, false, factor, nullptr, pool, level);
}

}  // namespace offload
