#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "io/error.h"

namespace offload::io {

namespace {

IoError failure(int code, const std::string& path, const std::string& what) {
  return IoError(code, path, what + " " + path + ": " + errno_text(code) + "; " + way_out(code));
}

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

bool is_power_of_two(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace

File::File(std::string path, uint64_t nbytes, bool direct, bool checked)
    : path_(std::move(path)), sums_(checked ? std::make_unique<Sums>() : nullptr), id_(next_id()) {
  bool created = false;
  buffered_fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  if (buffered_fd_ < 0 && errno == ENOENT) {
    buffered_fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    created = buffered_fd_ >= 0;
  }
  if (buffered_fd_ < 0) throw failure(errno, path_, "cannot open swap file");
  try {
    struct stat info;
    if (::fstat(buffered_fd_, &info) != 0) throw failure(errno, path_, "cannot stat swap file");
    if (!S_ISREG(info.st_mode)) throw IoError(EINVAL, path_, "cannot swap to " + path_ + ": it is no regular file");
    size_.store(static_cast<uint64_t>(info.st_size));
    reserve(nbytes);
    if (direct) open_direct();
  } catch (...) {
    close_all();
    if (created) ::unlink(path_.c_str());
    throw;
  }
}

File::~File() { close_all(); }

void File::close_all() noexcept {
  if (direct_fd_ >= 0) ::close(direct_fd_);
  if (buffered_fd_ >= 0) ::close(buffered_fd_);
  direct_fd_ = buffered_fd_ = -1;
}

void File::grow(uint64_t nbytes) { reserve(nbytes); }

void File::sync() {
  if (::fdatasync(buffered_fd_) != 0) throw failure(errno, path_, "writing back failed for swap file");
}

void File::reserve(uint64_t nbytes) {
  const uint64_t old = size_.load();
  if (nbytes == 0 && old == 0) return;
  if (nbytes > static_cast<uint64_t>(INT64_MAX)) throw failure(EFBIG, path_, "cannot reserve space for swap file");
  int code = EINTR;
  while (nbytes != 0 && code == EINTR) code = ::posix_fallocate(buffered_fd_, 0, static_cast<off_t>(nbytes));
  if (nbytes != 0 && code != 0) {
    struct statvfs space;
    const bool known = ::fstatvfs(buffered_fd_, &space) == 0;
    const uint64_t free_bytes = known ? static_cast<uint64_t>(space.f_bavail) * space.f_frsize : 0;
    // A failed reservation may have taken what was left of the disk.
    if (::ftruncate(buffered_fd_, static_cast<off_t>(old)) != 0) code = code ? code : errno;
    std::string message =
        "cannot reserve " + std::to_string(nbytes) + " bytes for swap file " + path_ + ": " + errno_text(code);
    if (known && (code == ENOSPC || code == EDQUOT)) message += ", " + std::to_string(free_bytes) + " bytes free";
    throw IoError(code, path_, message + "; " + way_out(code));
  }
  size_.store(std::max(old, nbytes));
}

void File::open_direct() {
  direct_fd_ = ::open(path_.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (direct_fd_ < 0) {
    refusal_ = "open with O_DIRECT: " + errno_text(errno);
    return;
  }
#ifdef STATX_DIOALIGN
  struct statx info = {};
  if (::statx(direct_fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
    if (info.stx_dio_mem_align == 0 || !is_power_of_two(info.stx_dio_offset_align)) {
      refusal_ = "the file system does no direct I/O on this file";
      return;
    }
    memory_align_ = info.stx_dio_mem_align;
    block_bytes_ = std::max<uint64_t>(kBlockBytesMin, info.stx_dio_offset_align);
  }
#endif
  // Some file systems accept the flag and refuse the first transfer.
  if (size_.load() >= block_bytes_) {
    void* probe = nullptr;
    if (::posix_memalign(&probe, std::max(memory_align_, kBlockBytesMin), block_bytes_) != 0) throw std::bad_alloc();
    const std::unique_ptr<void, decltype(&std::free)> owner(probe, &std::free);
    if (::pread(direct_fd_, probe, block_bytes_, 0) < 0 && errno == EINVAL) {
      refusal_ = "first direct read: " + errno_text(EINVAL);
      return;
    }
  }
  direct_.store(true);
}

}  // namespace offload::io
