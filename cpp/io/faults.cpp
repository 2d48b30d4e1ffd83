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

enum Salt : uint64_t {
  kDelay = 1,
  kDelayLength,
  kInterrupt,
  kShort,
  kShortLength,
  kReorder,
  kReorderLength,
  kError,
  kErrorKind,
  kTorn,
  kFlip,
  kFlipPlace
};

constexpr double kOvertakenMax = 4;

}  // namespace

FaultEngine::FaultEngine(EngineOptions options, Faults faults)
    : ThreadEngine(options, Deferred{}),
      faults_(faults),
      read_errno_(faults.read_errno),
      write_errno_(faults.write_errno) {
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

void FaultEngine::fail(int read_errno, int write_errno) {
  read_errno_.store(read_errno);
  write_errno_.store(write_errno);
}

double FaultEngine::chance(const Piece& piece, uint64_t salt) const {
  uint64_t hash = mix(faults_.seed ^ salt);
  for (const uint64_t part : {piece.from, piece.left, uint64_t{piece.barren}, uint64_t{piece.write}}) {
    hash = mix(hash ^ part);
  }
  return static_cast<double>(hash >> 11) * 0x1p-53;
}

// Waits while held, then perhaps until others have overtaken this attempt; never when all others wait as well.
void FaultEngine::wait_turn(const Piece& piece) {
  std::unique_lock<std::mutex> lock(gate_mutex_);
  gate_.wait(lock, [this] { return !held_; });
  ++active_;
  if (chance(piece, kReorder) < faults_.reorder_rate) {
    const uint64_t turn = ended_ + 1 + static_cast<uint64_t>(chance(piece, kReorderLength) * kOvertakenMax);
    ++parked_;
    if (parked_ == active_) {
      gate_.notify_all();
    }
    gate_.wait(lock, [&] { return ended_ >= turn || parked_ == active_; });
    --parked_;
  }
}

void FaultEngine::left() {
  const std::lock_guard<std::mutex> lock(gate_mutex_);
  --active_;
  ++ended_;
  gate_.notify_all();
}

int64_t FaultEngine::attempt(const Piece& piece) {
  wait_turn(piece);
  if (chance(piece, kDelay) < faults_.delay_rate) {
    std::this_thread::sleep_for(
        std::chrono::microseconds(static_cast<uint64_t>(chance(piece, kDelayLength) * faults_.delay_us_max)));
  }
  const int64_t result = tampered(piece);
  left();
  return result;
}

int64_t FaultEngine::tampered(const Piece& piece) {
  const int code = piece.write ? write_errno_.load() : read_errno_.load();
  if (code != 0 && piece.from < faults_.bad_end && piece.from + piece.left > faults_.bad_begin) return -code;
  const double interrupt = chance(piece, kInterrupt);
  if (interrupt < faults_.interrupt_rate) return interrupt < faults_.interrupt_rate / 2 ? -EINTR : -EAGAIN;
  if (chance(piece, kError) < (piece.write ? faults_.write_error_rate : faults_.read_error_rate)) {
    const double kind = chance(piece, kErrorKind);
    if (piece.write && kind < 0.5) partly(piece, part_of(piece));
    return piece.write && (kind < 0.25 || kind > 0.75) ? -ENOSPC : -EIO;
  }
  if (piece.write && chance(piece, kTorn) < faults_.torn_rate) {
    ++lies_;
    const int64_t result = partly(piece, part_of(piece));
    return result < 0 ? result : static_cast<int64_t>(piece.left);
  }
  const bool cut = piece.left > 1 && chance(piece, kShort) < faults_.short_rate;
  const int64_t result = cut ? partly(piece, part_of(piece)) : ThreadEngine::attempt(piece);
  if (!piece.write && result > 0 && chance(piece, kFlip) < faults_.flip_rate) {
    ++lies_;
    piece.at[static_cast<uint64_t>(chance(piece, kFlipPlace) * static_cast<double>(result))] ^= 16;
  }
  return result;
}

// Bytes of a part: a direct transfer ends on a sector, a buffered one anywhere.
uint64_t FaultEngine::part_of(const Piece& piece) const {
  const uint64_t unit = piece.direct ? 512 : 1;
  const auto wish = static_cast<uint64_t>(chance(piece, kShortLength) * static_cast<double>(piece.left));
  return std::min(std::max<uint64_t>(wish / unit * unit, unit), piece.left);
}

int64_t FaultEngine::partly(const Piece& piece, uint64_t length) {
  Piece part;
  part.transfer = piece.transfer;
  part.write = piece.write;
  part.direct = piece.direct;
  part.fd = piece.fd;
  part.at = piece.at;
  part.from = piece.from;
  part.left = length;
  part.sync = piece.sync;
  return ThreadEngine::attempt(part);
}

}  // namespace offload::io
