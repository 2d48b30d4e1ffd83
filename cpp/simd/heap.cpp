#include "simd/heap.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <mutex>

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

namespace {

// /proc/self/statm, open as long as it is this process's own and nobody closed it: opening takes longer than reading.
class Statm {
 public:
  ssize_t read(char* text, std::size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    struct stat now;
    if (file_ < 0 || pid_ != ::getpid() || ::fstat(file_, &now) != 0 || now.st_ino != ino_ || now.st_dev != dev_) {
      file_ = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);  // another's number is not ours to close
      if (file_ < 0 || ::fstat(file_, &now) != 0) return -1;
      pid_ = ::getpid();
      ino_ = now.st_ino;
      dev_ = now.st_dev;
    }
    return ::pread(file_, text, size, 0);
  }

 private:
  std::mutex mutex_;
  int file_ = -1;
  pid_t pid_ = 0;
  ino_t ino_ = 0;
  dev_t dev_ = 0;
};

}  // namespace

std::size_t resident_bytes() {
  static Statm statm;
  char text[256];
  const ssize_t n = statm.read(text, sizeof(text) - 1);
  if (n <= 0) return 0;
  text[n] = 0;
  char* after = nullptr;
  std::strtoull(text, &after, 10);  // what is mapped
  return std::strtoull(after, nullptr, 10) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace offload
