#include "io/transfer.h"

#include <cerrno>

#include "io/engine.h"

namespace offload::io {

Transfer::Transfer(std::shared_ptr<File> file, bool write, uint64_t offset, void* data, uint64_t nbytes,
                   std::shared_ptr<void> keep, Callback callback)
    : file_(std::move(file)),
      write_(write),
      offset_(offset),
      data_(static_cast<char*>(data)),
      nbytes_(nbytes),
      keep_(std::move(keep)),
      callback_(std::move(callback)) {}

void Transfer::wait() {
  const auto engine = engine_.lock();
  const auto patience = engine ? engine->patience() : std::chrono::milliseconds(1000);
  while (!wait_for(patience)) {
  }
}

bool Transfer::wait_for(std::chrono::milliseconds limit) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, limit, [this] { return done(); })) {
      if (error_) throw IoError(*error_);
      return true;
    }
  }
  if (const auto engine = engine_.lock()) engine->check_stuck(describe());
  return false;
}

std::string Transfer::describe() const {
  return std::string(write_ ? "write" : "read") + " of " + std::to_string(nbytes_) + " bytes at offset " +
         std::to_string(offset_) + " of " + file_->path();
}

void Transfer::fail(int code, const std::string& detail) {
  const std::lock_guard<std::mutex> lock(mutex_);
  failed_.store(true, std::memory_order_relaxed);
  if (error_) return;
  std::string message = describe() + " failed: " + (code ? errno_text(code) : std::string()) +
                        (code && !detail.empty() ? ", " : "") + detail;
  if (code != 0) message += "; " + way_out(code);
  error_.emplace(code, file_->path(), message);
}

void Transfer::complete() {
  const Callback callback = std::move(callback_);
  keep_.reset();  // before `done`: whoever waited finds the buffer released
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  if (callback) callback(*this);
}

}  // namespace offload::io
