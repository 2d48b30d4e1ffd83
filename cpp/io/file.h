// A swap file: one descriptor for direct I/O, one through the page cache, and what direct I/O asks of addresses.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "io/sums.h"

namespace offload::io {

// Direct transfers cover whole blocks of at least a page: a page is then never written directly and through the page
// cache by two transfers at once unless their bytes overlap.
constexpr uint64_t kBlockBytesMin = 4096;

class File {
 public:
  // Opens or creates `path` (mode 0600, close-on-exec) and reserves `nbytes` on the disk; what was in it stays.
  // Throws IoError; a file that this call created is removed again when its space cannot be reserved.
  // `checked`: what is written is remembered as sums and compared when it is read, see sums.h.
  File(std::string path, uint64_t nbytes, bool direct, bool checked = false);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Reserves up to `nbytes` in all. Throws IoError, then leaves the size as it was.
  void grow(uint64_t nbytes);

  // Waits until what went through the page cache is on the disk. Throws IoError: a write done earlier has failed.
  void sync();

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_.load(); }
  bool direct() const { return direct_.load(std::memory_order_relaxed); }
  const std::string& direct_refusal() const { return refusal_; }  // why direct I/O was asked for and is not used
  uint64_t block_bytes() const { return block_bytes_; }
  uint64_t memory_align() const { return memory_align_; }
  Sums* sums() const { return sums_.get(); }  // null: not checked
  uint64_t id() const { return id_; }         // no other file of this process has or had it
  int direct_fd() const { return direct_fd_; }
  int buffered_fd() const { return buffered_fd_; }

  // The first direct transfer was refused by the file system: from now on all go through the page cache.
  void refuse_direct() { direct_.store(false, std::memory_order_relaxed); }

 private:
  void reserve(uint64_t nbytes);
  void open_direct();
  void close_all() noexcept;

  std::string path_;
  std::string refusal_;
  const std::unique_ptr<Sums> sums_;
  const uint64_t id_;
  int buffered_fd_ = -1;
  int direct_fd_ = -1;
  std::atomic<bool> direct_{false};
  std::atomic<uint64_t> size_{0};
  uint64_t block_bytes_ = kBlockBytesMin;
  uint64_t memory_align_ = kBlockBytesMin;
};

}  // namespace offload::io
