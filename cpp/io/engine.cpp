#include "io/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <new>
#include <stdexcept>

namespace offload::io {

namespace {

constexpr size_t kPendingNamed = 4;

// How long to wait before asking whether the device is stuck: no busy waits, and reported soon after.
std::chrono::milliseconds patience_of(const EngineOptions& options) {
  const auto ms = static_cast<int64_t>(options.stuck_seconds * 250);
  return std::chrono::milliseconds(std::clamp<int64_t>(ms, 1, 1000));
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

// What a piece that the kernel has done amounts to, compared with or remembered as sums where its file keeps them.
Outcome settled(Piece& piece, const Outcome& outcome, uint64_t& verified) {
  Sums* const sums = piece.transfer->file().sums();
  if (sums == nullptr) return outcome;
  if (outcome.step == Step::kFailed) {
    sums->drop(piece);
    return outcome;
  }
  try {
    std::string wrong = sums->settle(piece, verified);
    return wrong.empty() ? outcome : Outcome{Step::kFailed, 0, std::move(wrong)};
  } catch (const std::bad_alloc&) {
    sums->drop(piece);
    return {Step::kFailed, ENOMEM, "no memory for its checksums"};
  }
}

}  // namespace

Engine::Engine(EngineOptions options) : options_(options), pid_(::getpid()) {
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw std::invalid_argument("queue_depth must be 1 to 4096, got " + std::to_string(options.queue_depth));
  }
  if (options.block_bytes == 0 || options.block_bytes % kBlockBytesMin != 0 || options.block_bytes > (1u << 30)) {
    throw std::invalid_argument("block must be a multiple of 4096 bytes up to 1 GiB, got " +
                                std::to_string(options.block_bytes));
  }
  if (!(options.stuck_seconds > 0 && options.stuck_seconds <= 1e6)) {
    throw std::invalid_argument("a device is stuck after more than 0 and at most 1e6 seconds, got " +
                                std::to_string(options.stuck_seconds));
  }
  flying_.reserve(options.queue_depth);
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
  transfer->engine_ = weak_from_this();
  bool hungry = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!room_.wait_for(lock, patience_of(options_), [this] { return closing_ || backlog_.size() < kBacklogMax; })) {
      if (!stuck()) continue;
      throw IoError(ETIMEDOUT, transfer->file().path(), transfer->describe() + " cannot be queued: " + pending());
    }
    if (closing_) throw std::runtime_error("the I/O engine is closed");
    if (nbytes != 0) {
      backlog_.push_back(transfer);
      counters_.waiting_max = std::max<uint64_t>(counters_.waiting_max, backlog_.size());
      if (outstanding_++ == 0) progress_ = Clock::now();
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
  piece.write = transfer.write_;
  piece.retries = 0;
  piece.asked_at = Clock::now();
  if (transfer.cut_ == 0) transfer.begun_at_ = piece.asked_at;
  piece.flying_index = flying_.size();
  flying_.push_back(&piece);
  counters_.in_flight_max = std::max<uint64_t>(counters_.in_flight_max, flying_.size());
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
  if (Sums* const sums = piece.transfer->file().sums()) sums->begin(piece);
  try {
    aim(piece);
    return true;
  } catch (const std::bad_alloc&) {
    answered(piece);
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

void Engine::answered(Piece& piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = Clock::now();
  progress_ = now;
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now - piece.asked_at).count();
  (piece.write ? counters_.write_us : counters_.read_us).add(static_cast<uint64_t>(std::max<int64_t>(us, 0)));
  flying_[piece.flying_index] = flying_.back();
  flying_[piece.flying_index]->flying_index = piece.flying_index;
  flying_.pop_back();
}

void Engine::finish(Piece& piece, const Outcome& kernel) {
  uint64_t verified = 0;
  const Outcome outcome = settled(piece, kernel, verified);
  const bool failed = outcome.step == Step::kFailed;
  if (failed) piece.transfer->fail(outcome.code, outcome.detail);
  std::shared_ptr<Transfer> transfer;
  bool last = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    transfer = std::move(piece.transfer);
    ++counters_.pieces;
    counters_.retries += piece.retries;
    if (!failed) counters_.bytes_verified += verified;
    --transfer->pieces_flying_;
    if (failed && transfer->cut_ < transfer->nbytes_) {
      // Only the front can be cut in part; the rest of a failed transfer is not asked for.
      transfer->cut_ = transfer->nbytes_;
      backlog_.pop_front();
      room_.notify_one();
    }
    if (!failed) (transfer->write_ ? counters_.bytes_written : counters_.bytes_read) += piece.nbytes;
    last = transfer->pieces_flying_ == 0 && transfer->cut_ == transfer->nbytes_;
    if (last) {
      ++counters_.requests;
      traced_.add({transfer->write_, transfer->nbytes_, transfer->begun_at_, Clock::now()});
    }
  }
  if (!last) return;
  transfer->complete();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--outstanding_ == 0) idle_.notify_all();
}

void Engine::wait_idle(std::unique_lock<std::mutex>& lock) {
  while (!idle_.wait_for(lock, patience_of(options_), [this] { return outstanding_ == 0; })) {
    if (stuck()) throw IoError(ETIMEDOUT, {}, "an I/O engine cannot finish its work: " + pending());
  }
}

void Engine::drain() {
  if (foreign()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_idle(lock);
}

void Engine::close() {
  if (foreign()) return;
  const std::lock_guard<std::mutex> once(close_mutex_);
  if (stopped_) return;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    room_.notify_all();
    wait_idle(lock);
  }
  work_.notify_all();
  stop();
  stopped_ = true;
}

bool Engine::stuck() const {
  return outstanding_ != 0 && Clock::now() - progress_ >= std::chrono::duration<double>(options_.stuck_seconds);
}

std::string Engine::pending() const {
  const auto now = Clock::now();
  const auto since = [now](Clock::time_point then) {
    return seconds_text(std::chrono::duration<double>(now - then).count());
  };
  std::string text = "no request has finished for " + since(progress_) + "; " + std::to_string(flying_.size()) +
                     " requests are with the kernel";
  std::vector<const Piece*> oldest(flying_.begin(), flying_.end());
  std::sort(oldest.begin(), oldest.end(), [](const Piece* a, const Piece* b) { return a->asked_at < b->asked_at; });
  for (size_t i = 0; i < oldest.size() && i < kPendingNamed; ++i) {
    const Piece& piece = *oldest[i];
    text += (i == 0 ? ": " : ", ") + std::string(piece.write ? "write" : "read") + " of " +
            std::to_string(piece.nbytes) + " bytes at offset " + std::to_string(piece.offset) + " of " +
            piece.transfer->file().path() + " since " + since(piece.asked_at);
  }
  if (oldest.size() > kPendingNamed) text += ", ...";
  return text + "; " + std::to_string(backlog_.size()) +
         " transfers wait behind them. The device may be stuck: see dmesg, and use another directory";
}

void Engine::check_stuck(const std::string& waiting) const {
  if (foreign()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stuck()) return;
  const Transfer& first = flying_.empty() ? *backlog_.front() : *flying_.front()->transfer;
  throw IoError(ETIMEDOUT, first.file().path(), waiting + " is not done: " + pending());
}

std::chrono::milliseconds Engine::patience() const { return patience_of(options_); }

bool Engine::register_memory(void*, uint64_t, std::shared_ptr<void>) { return false; }

bool Engine::closing() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return closing_;
}

Counters Engine::counters() const {
  if (foreign()) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  Counters now = counters_;
  now.in_flight = flying_.size();
  now.waiting = backlog_.size();
  return now;
}

uint64_t Engine::outstanding() const {
  if (foreign()) return 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  return outstanding_;
}

void Engine::trace(size_t most) {
  if (foreign()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  traced_.open(most);
}

std::pair<std::vector<Moved>, uint64_t> Engine::traced() const {
  if (foreign()) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  return traced_.noted();
}

void discard(Engine* engine) {
  if (engine == nullptr || engine->foreign()) return;
  engine->let_go();
  try {
    engine->close();
  } catch (const IoError&) {
    return;
  }
  delete engine;
}

}  // namespace offload::io
