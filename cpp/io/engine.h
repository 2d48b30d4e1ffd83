// Moves transfers between memory and files: first in, first out, in pieces, a bounded number of them in flight.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/counters.h"
#include "io/piece.h"
#include "io/ring.h"
#include "io/transfer.h"

namespace offload::io {

struct EngineOptions {
  unsigned queue_depth = 32;       // pieces in flight at once, 1 to 4096
  uint64_t block_bytes = 1 << 20;  // bytes of a piece, a multiple of 4096, at most 1 GiB
  double stuck_seconds = 60;       // after which, with work but none of it done, the device counts as stuck
};

// [Note: stuck]
// A request that the kernel has can be neither cancelled for certain nor its memory given up: a stuck device may still
// write to it. So a transfer is never failed for its age. Whoever waits is told, by an IoError with what is pending,
// and may wait again; an engine that cannot be drained is leaked with its transfers and all they keep.

// A transfer that is over: when its first piece was handed out, and when its last one came back (steady_clock).
struct Moved {
  bool write;
  uint64_t nbytes;
  std::chrono::steady_clock::time_point from, to;
};

// The part that all engines share. A subclass owns threads that `take` pieces, ask the kernel, `advance` them and hand
// them back by `answered` and `finish`; its destructor calls close().
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Returns at once unless `kBacklogMax` transfers already wait. `data` must stay valid until the transfer is done; it
  // keeps `keep` till then. Throws std::out_of_range, std::runtime_error after close() and in a forked child, or
  // IoError when it would wait for a stuck device.
  std::shared_ptr<Transfer> submit(std::shared_ptr<File> file, bool write, uint64_t offset, void* data, uint64_t nbytes,
                                   std::shared_ptr<void> keep = nullptr, Transfer::Callback callback = nullptr);

  // Blocks until all that was submitted is done and its callbacks have run. Throws IoError when the device is stuck.
  void drain();
  // Drains and ends the threads; idempotent. Does nothing in a forked child, which has no threads to end. As drain().
  void close();
  // Ends what tests hold back.
  virtual void let_go() {}

  // Throws IoError if the device is stuck; `waiting` is who wants to know, "read of 5 bytes ...".
  void check_stuck(const std::string& waiting) const;
  // How long it cannot be stuck yet.
  std::chrono::milliseconds patience() const;

  // Tells the kernel about memory that transfers will use, `keep` being what holds it; false where that is of no use
  // or not allowed. Such memory stays in use until the engine is closed.
  virtual bool register_memory(void* data, uint64_t nbytes, std::shared_ptr<void> keep);

  virtual const char* kind() const = 0;
  const EngineOptions& options() const { return options_; }
  Counters counters() const;
  // Transfers queued, or with the kernel and not over yet.
  uint64_t outstanding() const;
  // From here on the newest `most` transfers are noted; 0: none.
  void trace(size_t most);
  // What was noted, oldest first, and how many gave way.
  std::pair<std::vector<Moved>, uint64_t> traced() const;
  bool foreign() const;  // made before a fork of which this process is the child

  static constexpr size_t kBacklogMax = 1024;

 protected:
  explicit Engine(EngineOptions options);

  // The next piece, aimed; false when there is none now (and then `wake` is called when there is one).
  bool take(Piece& piece);
  // The next piece, waiting for one; false when the engine closes.
  bool take_waiting(Piece& piece);
  // The kernel has given its last answer for the piece, which goes to finish() next.
  void answered(Piece& piece);
  // Hands back a piece that is done or failed and completes its transfer with its last one.
  void finish(Piece& piece, const Outcome& outcome);

  virtual void wake() {}
  virtual void stop() = 0;  // called once, without work left and with `closing()` true
  bool closing() const;

 private:
  using Clock = std::chrono::steady_clock;

  bool cut(Piece& piece);
  bool aim_or_fail(Piece& piece);
  bool stuck() const;
  std::string pending() const;
  void wait_idle(std::unique_lock<std::mutex>& lock);

  const EngineOptions options_;
  const pid_t pid_;
  mutable std::mutex mutex_;
  std::condition_variable room_;  // the backlog got shorter
  std::condition_variable work_;  // the backlog got longer, or the engine closes
  std::condition_variable idle_;  // nothing is outstanding
  std::deque<std::shared_ptr<Transfer>> backlog_;
  std::vector<Piece*> flying_;  // handed out and not yet finished
  uint64_t outstanding_ = 0;
  Clock::time_point progress_;  // when work was last finished, or first there was some
  bool hungry_ = false;
  bool closing_ = false;
  bool stopped_ = false;
  Counters counters_;
  Ring<Moved> traced_;
  std::mutex close_mutex_;
};

// Deletes an engine, but neither in a forked child, where its locks may be held by threads that no longer exist, nor
// when it cannot be drained, see [Note: stuck].
void discard(Engine* engine);

}  // namespace offload::io
