#include "io/engine.h"

#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>

namespace offload::io {

Engine::Engine(EngineOptions options) : options_(options), pid_(::getpid()) {
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw std::invalid_argument("queue_depth must be 1 to 4096, got " + std::to_string(options.queue_depth));
  }
  if (options.block_bytes == 0 || options.block_bytes % kBlockBytesMin != 0 || options.block_bytes > (1u << 30)) {
    throw std::invalid_argument("block must be a multiple of 4096 bytes up to 1 GiB, got " +
                                std::to_string(options.block_bytes));
  }
}

bool Engine::foreign() const { return ::getpid() != pid_; }

std::shared_ptr<Transfer> Engine::submit(std::shared_ptr<File> file, bool write, uint64_t offset, void* data,
                                         uint64_t nbytes, std::shared_ptr<void> keep, Transfer::Callback callback) {
  if (foreign()) throw std::runtime_error("an I/O engine cannot be used in a forked child; make one there");
  if (offset > file->size() || nbytes > file->size() - offset) {
    throw std::out_of_range("bytes " + std::to_string(offset) + " to " + std::to_string(offset) + " + " +
                            std::to_string(nbytes) + " are outside " + file->path() + " of " +
                            std::to_string(file->size()) + " bytes");
  }
  auto transfer =
      std::make_shared<Transfer>(std::move(file), write, offset, data, nbytes, std::move(keep), std::move(callback));
  bool hungry = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    room_.wait(lock, [this] { return closing_ || backlog_.size() < kBacklogMax; });
    if (closing_) throw std::runtime_error("the I/O engine is closed");
    if (nbytes != 0) {
      backlog_.push_back(transfer);
      ++outstanding_;
      hungry = hungry_;
      hungry_ = false;
    } else {
      ++counters_.requests;
    }
  }
  if (nbytes == 0) {
    transfer->complete();
    return transfer;
  }
  // One transfer may be cut in many pieces.
  if (nbytes > options_.block_bytes) {
    work_.notify_all();
  } else {
    work_.notify_one();
  }
  if (hungry) wake();
  return transfer;
}

bool Engine::cut(Piece& piece) {
  if (backlog_.empty()) return false;
  Transfer& transfer = *backlog_.front();
  piece.transfer = backlog_.front();
  piece.data = transfer.data_ + transfer.cut_;
  piece.offset = transfer.offset_ + transfer.cut_;
  piece.nbytes = piece_bytes(transfer.file(), piece.offset, transfer.nbytes_ - transfer.cut_, options_.block_bytes);
  transfer.cut_ += piece.nbytes;
  ++transfer.pieces_flying_;
  if (transfer.cut_ == transfer.nbytes_) {
    backlog_.pop_front();
    room_.notify_one();
  }
  return true;
}

bool Engine::aim_or_fail(Piece& piece) {
  try {
    aim(piece);
    return true;
  } catch (const std::bad_alloc&) {
    finish(piece, {Step::kFailed, ENOMEM, "no memory for a bounce buffer"});
    return false;
  }
}

bool Engine::take(Piece& piece) {
  do {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!cut(piece)) {
      hungry_ = true;
      return false;
    }
  } while (!aim_or_fail(piece));
  return true;
}

bool Engine::take_waiting(Piece& piece) {
  do {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.wait(lock, [this] { return closing_ || !backlog_.empty(); });
    if (!cut(piece)) return false;
  } while (!aim_or_fail(piece));
  return true;
}

void Engine::finish(Piece& piece, const Outcome& outcome) {
  const std::shared_ptr<Transfer> transfer = std::move(piece.transfer);
  const bool failed = outcome.step == Step::kFailed;
  if (failed) transfer->fail(outcome.code, outcome.detail);
  bool last = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --transfer->pieces_flying_;
    if (failed && transfer->cut_ < transfer->nbytes_) {
      // Only the front can be cut in part; the rest of a failed transfer is not asked for.
      transfer->cut_ = transfer->nbytes_;
      backlog_.pop_front();
      room_.notify_one();
    }
    if (!failed) (transfer->write_ ? counters_.bytes_written : counters_.bytes_read) += piece.nbytes;
    last = transfer->pieces_flying_ == 0 && transfer->cut_ == transfer->nbytes_;
    if (last) ++counters_.requests;
  }
  if (!last) return;
  transfer->complete();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--outstanding_ == 0) idle_.notify_all();
}

void Engine::drain() {
  if (foreign()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return outstanding_ == 0; });
}

void Engine::close() {
  if (foreign()) return;
  const std::lock_guard<std::mutex> once(close_mutex_);
  if (stopped_) return;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    room_.notify_all();
    idle_.wait(lock, [this] { return outstanding_ == 0; });
  }
  work_.notify_all();
  stop();
  stopped_ = true;
}

bool Engine::closing() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return closing_;
}

Counters Engine::counters() const {
  if (foreign()) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

void discard(Engine* engine) {
  if (engine != nullptr && !engine->foreign()) delete engine;
}

}  // namespace offload::io
