#include "simd/heap.h"

#include <climits>

#if defined(__GLIBC__) || __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace offload {

#ifdef __GLIBC__
bool keep_freed(bool kept) {
  constexpr int kMostMapped = 32 << 20;  // the greatest threshold that mallopt takes on 64 bits
  const int mapped = mallopt(M_MMAP_THRESHOLD, kept ? kMostMapped : 1 << 20);
  const int trimmed = mallopt(M_TRIM_THRESHOLD, kept ? INT_MAX : 4 << 20);
  const int arenas = mallopt(M_ARENA_MAX, 2);
  return mapped && trimmed && arenas;
}
bool trim() { return malloc_trim(0) != 0; }
#if __GLIBC_PREREQ(2, 33)
std::size_t freed_bytes() { return mallinfo2().fordblks; }
#else
std::size_t freed_bytes() { return 0; }
#endif
#else
bool keep_freed(bool) { return false; }
bool trim() { return false; }
std::size_t freed_bytes() { return 0; }
#endif

}  // namespace offload
