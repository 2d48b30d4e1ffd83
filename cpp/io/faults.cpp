#include "io/faults.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace offload::io {

namespace {

uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

enum Salt : uint64_t { kDelay = 1, kDelayLength, kInterrupt, kShort, kShortLength };

}  // namespace

FaultEngine::FaultEngine(EngineOptions options, Faults faults) : ThreadEngine(options, Deferred{}), faults_(faults) {
  start();
}

FaultEngine::~FaultEngine() {
  release();
  close();
}

void FaultEngine::hold() {
  const std::lock_guard<std::mutex> lock(gate_mutex_);
  held_ = true;
}

void FaultEngine::release() {
  const std::lock_guard<std::mutex> lock(gate_mutex_);
  held_ = false;
  gate_.notify_all();
}

double FaultEngine::chance(const Piece& piece, uint64_t salt) {
  uint64_t hash = mix(faults_.seed ^ salt);
  for (const uint64_t part : {piece.from, piece.left, uint64_t{piece.barren}, uint64_t{piece.transfer->is_write()}}) {
    hash = mix(hash ^ part);
  }
  return static_cast<double>(hash >> 11) * 0x1p-53;
}

int64_t FaultEngine::attempt(const Piece& piece) {
  {
    std::unique_lock<std::mutex> lock(gate_mutex_);
    gate_.wait(lock, [this] { return !held_; });
  }
  if (chance(piece, kDelay) < faults_.delay_rate) {
    std::this_thread::sleep_for(
        std::chrono::microseconds(static_cast<uint64_t>(chance(piece, kDelayLength) * faults_.delay_us_max)));
  }
  const int code = piece.transfer->is_write() ? faults_.write_errno : faults_.read_errno;
  if (code != 0 && piece.from < faults_.bad_end && piece.from + piece.left > faults_.bad_begin) return -code;
  const double interrupt = chance(piece, kInterrupt);
  if (interrupt < faults_.interrupt_rate) return interrupt < faults_.interrupt_rate / 2 ? -EINTR : -EAGAIN;
  if (piece.left > 1 && chance(piece, kShort) < faults_.short_rate) {
    // A direct transfer ends short on a sector, a buffered one anywhere.
    const uint64_t unit = piece.direct ? 512 : 1;
    const auto wish = static_cast<uint64_t>(chance(piece, kShortLength) * static_cast<double>(piece.left));
    const uint64_t length = std::max<uint64_t>(wish / unit * unit, unit);
    if (length < piece.left) {
      Piece part;
      part.transfer = piece.transfer;
      part.fd = piece.fd;
      part.at = piece.at;
      part.from = piece.from;
      part.left = length;
      part.sync = piece.sync;
      return ThreadEngine::attempt(part);
    }
  }
  return ThreadEngine::attempt(piece);
}

}  // namespace offload::io
