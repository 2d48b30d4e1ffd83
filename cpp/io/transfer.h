// One submitted move between memory and a file: owns its buffer until it is done, can be waited on by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "io/error.h"
#include "io/file.h"

namespace offload::io {

class Engine;

class Transfer {
 public:
  // Runs once on an engine's thread when the transfer is done; must neither block nor submit.
  using Callback = std::function<void(const Transfer&)>;

  Transfer(std::shared_ptr<File> file, bool write, uint64_t offset, void* data, uint64_t nbytes,
           std::shared_ptr<void> keep, Callback callback);

  // Blocks until the transfer is done; throws IoError when it failed, at every call, or when the device is stuck: the
  // transfer is then still under way, see [Note: stuck].
  void wait();
  // As `wait`, giving up after `limit`: false when not yet done.
  bool wait_for(std::chrono::milliseconds limit);
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Only once done.
  const std::optional<IoError>& error() const { return error_; }

  std::string describe() const;  // "read of 5 bytes at offset 0 of /path"

  bool is_write() const { return write_; }
  uint64_t offset() const { return offset_; }
  uint64_t nbytes() const { return nbytes_; }
  File& file() const { return *file_; }
  const std::shared_ptr<File>& shared_file() const { return file_; }

 private:
  friend class Engine;

  void fail(int code, const std::string& detail);  // the first failure is kept
  void complete();

  const std::shared_ptr<File> file_;
  const bool write_;
  const uint64_t offset_;
  char* const data_;
  const uint64_t nbytes_;
  std::shared_ptr<void> keep_;
  Callback callback_;
  std::weak_ptr<const Engine> engine_;

  // The engine's, under its mutex.
  std::chrono::steady_clock::time_point begun_at_;  // when its first piece was
  uint64_t cut_ = 0;                                // bytes handed out as pieces
  uint32_t pieces_flying_ = 0;                      // handed out and not yet finished

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<IoError> error_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> done_{false};
};

}  // namespace offload::io
