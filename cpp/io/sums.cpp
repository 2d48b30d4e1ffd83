#include "io/sums.h"

#include <algorithm>
#include <cstdio>

#include "io/checksum.h"
#include "io/piece.h"

namespace offload::io {

namespace {

constexpr uint64_t kBlock = Sums::kBlockBytes;
constexpr uint64_t kSegmentBlocks = 16384;

uint32_t sum_of(const char* data, uint64_t nbytes) {
  const uint32_t sum = checksum(data, nbytes);
  return sum != 0 ? sum : 1;  // 0 means none
}

bool overlap(const Piece& a, const Piece& b) {
  return a.offset < b.offset + b.nbytes && b.offset < a.offset + a.nbytes;
}

std::string complaint(uint64_t begin, uint64_t end, uint32_t written, uint32_t found) {
  char text[256];
  std::snprintf(text, sizeof text,
                "bytes %llu to %llu of the file are not what was written there (checksum %08x, written as %08x)",
                static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end), found, written);
  return std::string(text) +
         "; the drive, its cable or another program changed them: check the drive (smartctl -a), swap to another one "
         "and start again from the last checkpoint";
}

}  // namespace

uint32_t* Sums::entry(uint64_t block, bool make) {
  const uint64_t segment = block / kSegmentBlocks;
  if (segment >= table_.size()) {
    if (!make) return nullptr;
    table_.resize(segment + 1);
  }
  if (!table_[segment]) {
    if (!make) return nullptr;
    table_[segment] = std::make_unique<uint32_t[]>(kSegmentBlocks);
  }
  return &table_[segment][block % kSegmentBlocks];
}

void Sums::forget(uint64_t begin, uint64_t end) {
  for (uint64_t block = begin / kBlock; block * kBlock < end; ++block) {
    if (uint32_t* const sum = entry(block, false)) *sum = 0;
    if (fragments_.empty()) continue;
    const auto found = fragments_.find(block);
    if (found == fragments_.end()) continue;
    auto& list = found->second;
    const uint64_t from = std::max(begin, block * kBlock) - block * kBlock;
    const uint64_t to = std::min(end, (block + 1) * kBlock) - block * kBlock;
    list.erase(
        std::remove_if(list.begin(), list.end(), [&](const Fragment& f) { return f.begin < to && from < f.end; }),
        list.end());
    if (list.empty()) fragments_.erase(found);
  }
}

void Sums::begin(Piece& piece) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  piece.contested = false;
  for (Piece* const other : flying_) {
    if ((piece.write || other->write) && overlap(piece, *other)) piece.contested = other->contested = true;
  }
  flying_.push_back(&piece);
  if (piece.write) forget(piece.offset, piece.offset + piece.nbytes);
}

bool Sums::leave(Piece& piece) {
  const auto found = std::find(flying_.begin(), flying_.end(), &piece);
  if (found == flying_.end()) return false;
  flying_.erase(found);
  return !piece.contested;
}

void Sums::drop(Piece& piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  leave(piece);
}

void Sums::remember(uint64_t begin, uint64_t end, const std::vector<uint32_t>& sums) {
  size_t i = 0;
  for (uint64_t at = begin; at < end; ++i) {
    const uint64_t block = at / kBlock;
    const uint64_t stop = std::min(end, (block + 1) * kBlock);
    if (stop - at == kBlock) {
      *entry(block, true) = sums[i];
    } else {
      fragments_[block].push_back(
          {static_cast<uint32_t>(at - block * kBlock), static_cast<uint32_t>(stop - block * kBlock), sums[i]});
    }
    at = stop;
  }
}

// What must be found in the bytes that a read brought: all sums of stretches that it wants a byte of and has whole.
std::vector<Sums::Wanted> Sums::wanted(const Piece& piece, uint64_t seen_begin, uint64_t seen_end) {
  std::vector<Wanted> found;
  const uint64_t begin = piece.offset, end = piece.offset + piece.nbytes;
  const auto add = [&](uint64_t from, uint64_t to, uint32_t sum) {
    if (from < end && begin < to && from >= seen_begin && to <= seen_end) found.push_back({from, to, sum});
  };
  for (uint64_t block = begin / kBlock; block * kBlock < end; ++block) {
    const uint32_t* const sum = entry(block, false);
    if (sum != nullptr && *sum != 0) add(block * kBlock, (block + 1) * kBlock, *sum);
    if (fragments_.empty()) continue;
    const auto list = fragments_.find(block);
    if (list == fragments_.end()) continue;
    for (const Fragment& f : list->second) add(block * kBlock + f.begin, block * kBlock + f.end, f.sum);
  }
  return found;
}

std::string Sums::settle(Piece& piece, uint64_t& verified) {
  if (piece.write) {
    std::vector<uint32_t> sums;
    const uint64_t end = piece.offset + piece.nbytes;
    for (uint64_t at = piece.offset; at < end;) {
      const uint64_t stop = std::min(end, (at / kBlock + 1) * kBlock);
      sums.push_back(sum_of(piece.data + (at - piece.offset), stop - at));
      at = stop;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (leave(piece)) remember(piece.offset, end, sums);
    return {};
  }
  const uint64_t seen_begin = piece.bounced ? piece.bounce_from : piece.offset;
  const uint64_t seen_end = piece.bounced ? piece.bounce_to : piece.offset + piece.nbytes;
  const char* const seen = piece.bounced ? piece.bounce.data() : piece.data;
  std::vector<Wanted> list;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (leave(piece)) list = wanted(piece, seen_begin, seen_end);
  }
  for (const Wanted& w : list) {
    const uint32_t sum = sum_of(seen + (w.begin - seen_begin), w.end - w.begin);
    if (sum != w.sum) return complaint(w.begin, w.end, w.sum, sum);
    verified += std::min(w.end, piece.offset + piece.nbytes) - std::max(w.begin, piece.offset);
  }
  return {};
}

uint64_t Sums::nbytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t total = table_.capacity() * sizeof(Segment) + fragments_.size() * 96;
  for (const Segment& segment : table_) total += segment ? kSegmentBlocks * sizeof(uint32_t) : 0;
  return total;
}

}  // namespace offload::io
