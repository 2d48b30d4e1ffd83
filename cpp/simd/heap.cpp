#include "simd/heap.h"

#if defined(__GLIBC__) || __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace offload {

#ifdef __GLIBC__
bool tune_malloc() {
  const int mapped = mallopt(M_MMAP_THRESHOLD, 1 << 20);
  const int trimmed = mallopt(M_TRIM_THRESHOLD, 4 << 20);
  const int arenas = mallopt(M_ARENA_MAX, 2);
  return mapped && trimmed && arenas;
}
bool trim() { return malloc_trim(0) != 0; }
#else
bool tune_malloc() { return false; }
bool trim() { return false; }
#endif

}  // namespace offload
