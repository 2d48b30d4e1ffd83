// Moves transfers between memory and files: first in, first out, in pieces, a bounded number of them in flight.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "io/piece.h"
#include "io/transfer.h"

namespace offload::io {

struct EngineOptions {
  unsigned queue_depth = 32;       // pieces in flight at once, 1 to 4096
  uint64_t block_bytes = 1 << 20;  // bytes of a piece, a multiple of 4096, at most 1 GiB
};

struct Counters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t requests = 0;  // transfers completed
};

// The part that all engines share. A subclass owns threads that `take` pieces, ask the kernel, `advance` them and hand
// them back by `finish`; its destructor calls close().
class Engine {
 public:
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Returns at once unless `kBacklogMax` transfers already wait. `data` must stay valid until the transfer is done; it
  // keeps `keep` till then. Throws std::out_of_range, or std::runtime_error after close() and in a forked child.
  std::shared_ptr<Transfer> submit(std::shared_ptr<File> file, bool write, uint64_t offset, void* data, uint64_t nbytes,
                                   std::shared_ptr<void> keep = nullptr, Transfer::Callback callback = nullptr);

  // Blocks until all that was submitted is done and its callbacks have run.
  void drain();
  // Drains and ends the threads; idempotent. Does nothing in a forked child, which has no threads to end.
  void close();

  virtual const char* kind() const = 0;
  const EngineOptions& options() const { return options_; }
  Counters counters() const;
  bool foreign() const;  // made before a fork of which this process is the child

  static constexpr size_t kBacklogMax = 1024;

 protected:
  explicit Engine(EngineOptions options);

  // The next piece, aimed; false when there is none now (and then `wake` is called when there is one).
  bool take(Piece& piece);
  // The next piece, waiting for one; false when the engine closes.
  bool take_waiting(Piece& piece);
  // Hands back a piece that is done or failed and completes its transfer with its last one.
  void finish(Piece& piece, const Outcome& outcome);

  virtual void wake() {}
  virtual void stop() = 0;  // called once, without work left and with `closing()` true
  bool closing() const;

 private:
  bool cut(Piece& piece);
  bool aim_or_fail(Piece& piece);

  const EngineOptions options_;
  const pid_t pid_;
  mutable std::mutex mutex_;
  std::condition_variable room_;  // the backlog got shorter
  std::condition_variable work_;  // the backlog got longer, or the engine closes
  std::condition_variable idle_;  // nothing is outstanding
  std::deque<std::shared_ptr<Transfer>> backlog_;
  uint64_t outstanding_ = 0;
  bool hungry_ = false;
  bool closing_ = false;
  bool stopped_ = false;
  Counters counters_;
  std::mutex close_mutex_;
};

// Deletes an engine, but not in a forked child: its locks may be held there by threads that no longer exist.
void discard(Engine* engine);

}  // namespace offload::io
