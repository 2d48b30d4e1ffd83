// A threaded memcpy.
#pragma once

#include <cstddef>

#include "simd/dispatch.h"
#include "simd/thread_pool.h"

namespace offload {

// The ranges must not overlap. Large copies go past the caches.
void copy(void* dst, const void* src, std::size_t nbytes, ThreadPool& pool, Level level = current_level());

}  // namespace offload
